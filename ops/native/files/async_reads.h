// Several reads of files under way at once, without a thread for each (Linux AIO).
#pragma once
#include <errno.h>
#include <linux/aio_abi.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <cstdint>

namespace chorus {

constexpr unsigned kMostReads = 64;

// Part of a file on its way into memory.
struct Read {
    int64_t start, end;    // bytes of the file that are wanted
    int64_t first, bytes;  // what is read for that: whole sectors around them
    char* to;
    int64_t found;         // bytes from `first` that are there
    bool pending;          // the system may be writing to `to`
};

// For one thread at a time.
class AsyncReads {
   public:
    AsyncReads() {
        if (syscall(SYS_io_setup, kMostReads, &context_) < 0) context_ = 0;
    }
    ~AsyncReads() {
        if (context_ && drain()) syscall(SYS_io_destroy, context_);
    }
    AsyncReads(const AsyncReads&) = delete;

    // Begin reads, if there is room for all of them. A read that could not be begun is not pending afterwards.
    //
    //   fd     of a file, open with O_DIRECT
    //   reads  [count]; must outlive the reads
    void begin(int fd, Read* reads, size_t count) {
        if (!context_ || count > kMostReads - under_way_) return;
        iocb controls[kMostReads];
        iocb* pointers[kMostReads];
        for (size_t i = 0; i < count; i++) {
            controls[i] = {};
            controls[i].aio_data = (uint64_t)(uintptr_t)&reads[i];
            controls[i].aio_lio_opcode = IOCB_CMD_PREAD;
            controls[i].aio_fildes = (uint32_t)fd;
            controls[i].aio_buf = (uint64_t)(uintptr_t)reads[i].to;
            controls[i].aio_nbytes = (uint64_t)reads[i].bytes;
            controls[i].aio_offset = reads[i].first;
            pointers[i] = &controls[i];
        }
        for (size_t done = 0; done < count;) {
            const long begun = syscall(SYS_io_submit, context_, (long)(count - done), pointers + done);
            if (begun <= 0) return;
            for (long i = 0; i < begun; i++) reads[done++].pending = true;
            under_way_ += (unsigned)begun;
        }
    }

    // Sleep until one is done. Whether any was: false if the system refuses to tell.
    bool wait() {
        io_event events[kMostReads];
        long count;
        do count = syscall(SYS_io_getevents, context_, 1L, (long)kMostReads, events, nullptr);
        while (count < 0 && errno == EINTR);
        if (count <= 0) return false;
        for (long i = 0; i < count; i++) {
            Read* read = (Read*)(uintptr_t)events[i].data;
            read->found = events[i].res > 0 ? events[i].res : 0;
            read->pending = false;
        }
        under_way_ -= (unsigned)count;
        return true;
    }

    // Sleep until no read is under way. False if the system refuses to tell: then the reads' memory must not be used
    // again.
    bool drain() {
        while (under_way_)
            if (!wait()) return false;
        return true;
    }

   private:
    aio_context_t context_ = 0;
    unsigned under_way_ = 0;
};

}  // namespace chorus
