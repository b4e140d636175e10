// An adapter's rows from its weights file, group of layers by group: read past the page cache, one group ahead, and laid
// out from where they were read to.
//
// What is read here is kept in another layout; a second copy in the page cache would only cost the time to fill it and
// push out what others need. What is in the page cache already is taken from there.
#pragma once
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <cstdio>
#include <memory>
#include <mutex>
#include "files/async_reads.h"
#include "team/buffer.h"
#include "files/slab_rows.h"

namespace chorus {

constexpr int64_t kSector = 4096;  // O_DIRECT wants offsets, lengths and addresses to be multiples of the disk's
// A group in use, the next under way, and the one before it, which may still be hashed. No other is under way: it would
// take the disk's time from the next.
constexpr int kBuffers = 3;

// A group of reads, described to Python by program/layout.h: spans and jobs of each, by their numbers.
struct ReadGroup {
    int64_t spans_begin, spans_end, jobs_begin, jobs_end;
};
struct Span {
    int64_t start, end;
};

// State of one reader, kept from file to file: the system clears fresh pages at some cost. On huge pages, because the
// disk's requests are of so many pages at most, and each page must be found and held: a third of the time of small ones.
struct ReadStation {
    char* buffer(int slot, size_t bytes) {
        constexpr size_t page = HugePages<char>::kHuge;
        if (bytes > memory[slot].size()) memory[slot] = Buffer<char>((bytes + page - 1) / page * page);
        return memory[slot].data();
    }

    AsyncReads reads;
    Buffer<char> memory[kBuffers];
};

// Idle stations. As many exist as files were ever read at once.
class ReadStations {
   public:
    std::unique_ptr<ReadStation> take() {
        std::lock_guard<std::mutex> lock(mutex_);
        if (idle_.empty()) return std::make_unique<ReadStation>();
        auto found = std::move(idle_.back());
        idle_.pop_back();
        return found;
    }
    void give_back(std::unique_ptr<ReadStation> station) {
        std::lock_guard<std::mutex> lock(mutex_);
        idle_.push_back(std::move(station));
    }

   private:
    std::mutex mutex_;
    std::vector<std::unique_ptr<ReadStation>> idle_;
};

inline ReadStations& read_stations() {
    static auto* stations = new ReadStations;  // never destroyed: threads may still read when the process ends
    return *stations;
}

class FileRows {
   public:
    // The first group is on its way when this returns.
    //
    //   fd       of a file, open; must outlive this
    //   spans    bytes that are read, of all groups
    //   groups   [count]
    //   jobs     of all groups; starts are bytes from the file's beginning; must outlive this
    //   element  of the output
    FileRows(int fd, const Span* spans, const ReadGroup* groups, int64_t count, const ReadJob* jobs, Element element)
        : fd_(fd), groups_(groups, groups + count), jobs_(jobs), element_(element), station_(read_stations().take()) {
        char path[32];
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        direct_ = open(path, O_RDONLY | O_CLOEXEC | O_DIRECT);
        pieces_.resize(count);
        begun_.resize(count);
        for (int64_t g = 0; g < count; g++)
            for (int64_t s = groups[g].spans_begin; s < groups[g].spans_end; s++) {
                const int64_t first = spans[s].start / kSector * kSector;
                const int64_t end = (spans[s].end + kSector - 1) / kSector * kSector;
                pieces_[g].push_back({spans[s].start, spans[s].end, first, end - first, nullptr, 0, false});
            }
        if (count) begin(0);
    }

    ~FileRows() {
        if (station_->reads.drain()) read_stations().give_back(std::move(station_));
        else station_.release();  // the system may write to its memory yet
        if (direct_ >= 0) close(direct_);
    }

    // Wait for the next group and lay its rows out; returns whether that was done. The group after it comes next in any case.
    //
    //   out    where the jobs' elements are counted from
    //   fault  of the first job that failed: written
    bool next(void* out, ReadFault& fault) {
        const int64_t g = next_++;
        const ReadGroup& group = groups_[g];
        fault = {};
        fault.job = group.jobs_begin;
        begin(g);
        const bool whole = finish(g, fault);
        if (next_ < (int64_t)groups_.size()) begin(next_);  // only now: the caller waits for the group before it
        if (!whole) return false;
        SlabRows rows(element_, out);
        for (fault.job = group.jobs_begin; fault.job < group.jobs_end; fault.job++) {
            ReadJob job = jobs_[fault.job];
            job.a_start = (int64_t)at(g, job.a_start, job.rank * job.d_in * bytes_of(job.a_element));
            job.b_start = (int64_t)at(g, job.b_start, job.rank * job.d_out * bytes_of(job.b_element));
            if (!job.a_start || !job.b_start) {
                fault.fault = kEnds;
                fault.side = job.a_start != 0;
                return false;
            }
            if (!rows.write(job, fault)) return false;
        }
        return true;
    }

    // Address of some of the file's bytes, of the group that `next` read last, until it has been called twice more; null if
    // they were not read.
    //
    //   start  first byte
    //   bytes  their number
    const char* at(int64_t start, int64_t bytes) const { return next_ ? at(next_ - 1, start, bytes) : nullptr; }

   private:
    static int64_t bytes_of(Element element) { return element == kF32 ? 4 : 2; }

    const char* at(int64_t g, int64_t start, int64_t bytes) const {
        for (const Read& piece : pieces_[g])
            if (start >= piece.start && start + bytes <= piece.end && start + bytes <= piece.first + piece.found)
                return piece.to + (start - piece.first);
        return nullptr;
    }

    // Have what is not in the page cache fetched, if it has not been.
    void begin(int64_t g) {
        std::vector<Read>& pieces = pieces_[g];
        if (begun_[g] || broken_) return;
        begun_[g] = true;
        int64_t bytes = 0;
        for (const Read& piece : pieces) bytes += piece.bytes;
        char* to = station_->buffer(g % kBuffers, (size_t)bytes);
        for (Read& piece : pieces) {
            piece.to = to;
            to += piece.bytes;
        }
        if (direct_ >= 0 && !is_cached(pieces)) station_->reads.begin(direct_, pieces.data(), pieces.size());
    }

    // True if every piece is whole. What was not begun, or came short, is read in the plain way, which tells why.
    bool finish(int64_t g, ReadFault& fault) {
        for (const Read& piece : pieces_[g])  // all, since the buffer will be used again
            while (piece.pending && !broken_) broken_ = !station_->reads.wait();
        if (broken_) return fail(fault, kUnreadable, EIO);
        for (Read& piece : pieces_[g])
            while (piece.first + piece.found < piece.end) {
                const ssize_t count =
                    pread(fd_, piece.to + piece.found, piece.bytes - piece.found, piece.first + piece.found);
                if (count < 0 && errno == EINTR) continue;
                if (count <= 0) return fail(fault, count ? kUnreadable : kEnds, count ? errno : 0);
                piece.found += count;
            }
        return true;
    }

    static bool fail(ReadFault& fault, Fault kind, int error) {
        fault.fault = kind;
        fault.error = error;
        return false;
    }

    // True if the page cache holds all of it. A wrong answer costs nothing but time.
    bool is_cached(const std::vector<Read>& pieces) const {
        struct stat status;
        if (fstat(fd_, &status) < 0) return true;
        for (const Read& piece : pieces) {
            const int64_t end = std::min<int64_t>(piece.first + piece.bytes, status.st_size);
            if (end <= piece.first) continue;
            struct {
                uint64_t offset, bytes;
            } range = {(uint64_t)piece.first, (uint64_t)(end - piece.first)};
            struct {
                uint64_t cached, dirty, written, evicted, lately_evicted;
            } pages = {};
            if (syscall(kCachestat, fd_, &range, &pages, 0) == 0) {
                if ((int64_t)pages.cached * kSector < end - piece.first) return false;
                continue;
            }
            char byte;  // an older system is asked for a byte that it may not fetch
            iovec one = {&byte, 1};
            if (preadv2(fd_, &one, 1, piece.first, RWF_NOWAIT) != 1) return false;
        }
        return true;
    }

    static constexpr long kCachestat = 451;  // unknown to the headers of older systems

    int fd_, direct_;
    std::vector<ReadGroup> groups_;
    const ReadJob* jobs_;
    Element element_;
    std::unique_ptr<ReadStation> station_;
    std::vector<std::vector<Read>> pieces_;
    std::vector<char> begun_;
    int64_t next_ = 0;
    bool broken_ = false;  // the system doesn't tell what it may still be writing to: no buffer may be used again
};

}  // namespace chorus
