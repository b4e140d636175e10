// The library's functions, as ops/native.py and ops/native_reader.py call them; one library for each level.
#pragma once
#include "ban.h"
#include "decoder.h"
#include "file_rows.h"
#include "rates.h"
#include "supported.h"

namespace chorus {

struct AnyDecoder {
    virtual ~AnyDecoder() = default;
    virtual void forward(const StepDesc& step) = 0;
    virtual void score_logits(int first, int count, float* logits) = 0;
    virtual void sample(Draw* draws, int num_draws, Score* scores, int num_scores) = 0;
    virtual float merge(const MergeDesc& desc) = 0;
    virtual void join(Ranks* ranks, int vocab) = 0;
    virtual int threads() const = 0;
};

template <class T>
struct TypedDecoder final : AnyDecoder {
    TypedDecoder(const ModelDesc& model, int threads) : team(threads), decoder(model, team) {}
    void forward(const StepDesc& step) override { decoder.forward(step); }
    void score_logits(int first, int count, float* logits) override { decoder.score_logits(first, count, logits); }
    void sample(Draw* draws, int num_draws, Score* scores, int num_scores) override {
        decoder.sample(draws, num_draws, scores, num_scores);
    }
    float merge(const MergeDesc& desc) override { return decoder.merge(desc); }
    void join(Ranks* ranks, int vocab) override { decoder.join(ranks, vocab); }
    int threads() const override { return team.size(); }
    Team team;
    Decoder<T> decoder;
};

}  // namespace chorus

using namespace chorus;

extern "C" {

// Sizes of the descriptors, by which the Python side rejects a library built from other sources than its own.
CHORUS_API int64_t chorus_descriptors() {
    return ((((int64_t)sizeof(StepDesc) * 1000 + sizeof(ModelDesc)) * 1000 + sizeof(LayerDesc)) * 1000 +
            sizeof(MergeDesc)) *
               1000 +
           (sizeof(LentDesc) + sizeof(AssistDesc)) * 10000 + sizeof(Handover);
}

// element: 2 for bfloat16, 4 for float32.
CHORUS_API void* chorus_decoder_create(int element, const ModelDesc* model, int threads) {
    if (element == 2) return new TypedDecoder<bf16>(*model, threads);
    return new TypedDecoder<float>(*model, threads);
}

CHORUS_API void chorus_decoder_forward(void* decoder, const StepDesc* step) { ((AnyDecoder*)decoder)->forward(*step); }

CHORUS_API void chorus_decoder_score_logits(void* decoder, int first, int count, float* logits) {
    ((AnyDecoder*)decoder)->score_logits(first, count, logits);
}

CHORUS_API void chorus_decoder_sample(void* decoder, Draw* draws, int num_draws, Score* scores, int num_scores) {
    ((AnyDecoder*)decoder)->sample(draws, num_draws, scores, num_scores);
}

// masks: [count, words], of each a row of the logits, then its mask; see ban.h.
CHORUS_API void chorus_ban(float* logits, int64_t vocab, const int32_t* masks, int64_t count, int64_t words) {
    for (const int32_t* mask = masks; mask < masks + count * words; mask += words)
        ban(logits + mask[0] * vocab, vocab, mask + 1);
}

// One matrix with adapters in it, between steps; see Merge.
CHORUS_API float chorus_decoder_merge(void* decoder, const MergeDesc* desc) {
    return ((AnyDecoder*)decoder)->merge(*desc);
}

// Number of threads that the next step takes: all, or fewer while others keep the processors busy.
CHORUS_API int chorus_decoder_threads(void* decoder) { return ((AnyDecoder*)decoder)->threads(); }

// Before the first step: see Decoder::join. The ranks stay the caller's and must outlive it.
CHORUS_API void chorus_decoder_join(void* decoder, void* ranks, int vocab) {
    ((AnyDecoder*)decoder)->join((Ranks*)ranks, vocab);
}

CHORUS_API void chorus_decoder_destroy(void* decoder) { delete (AnyDecoder*)decoder; }

// Bytes per second that threads read of a memory, and floating-point operations per second; element as above.
CHORUS_API double chorus_read_rate(int threads, const char* memory, int64_t bytes) {
    Team team(threads);
    return read_rate(team, memory, bytes);
}
CHORUS_API double chorus_product_rate(int threads, int element, int64_t rounds) {
    Team team(threads);
    return element == 2 ? product_rate<bf16>(team, rounds) : product_rate<float>(team, rounds);
}

// Sums over ranks: see ranks.h. `memory` must outlive it.
CHORUS_API int64_t chorus_ranks_bytes(int size, int64_t floats) { return Ranks::bytes(size, floats); }
CHORUS_API void* chorus_ranks_create(void* memory, int rank, int size, int64_t floats, double seconds,
                                     double spinning) {
    return new Ranks(memory, rank, size, floats, seconds, spinning);
}
CHORUS_API void chorus_ranks_begin(void* ranks, int64_t step) { ((Ranks*)ranks)->begin(step); }
CHORUS_API int chorus_ranks_add_up(void* ranks, float* data, int64_t count) {
    return ((Ranks*)ranks)->add_up(data, count);
}
CHORUS_API int chorus_ranks_gather(void* ranks, const float* part, int64_t rows, int64_t width, float* out) {
    return ((Ranks*)ranks)->gather(part, rows, width, out);
}
CHORUS_API int chorus_ranks_state(void* ranks) { return ((Ranks*)ranks)->state(); }
CHORUS_API void chorus_ranks_fail(void* ranks, int64_t step) { ((Ranks*)ranks)->fail(step); }
CHORUS_API void chorus_ranks_lose(void* ranks) { ((Ranks*)ranks)->lose(); }
CHORUS_API int chorus_ranks_meet(void* ranks) { return ((Ranks*)ranks)->meet(); }
CHORUS_API void chorus_ranks_post(void* ranks) { ((Ranks*)ranks)->post(); }
CHORUS_API int64_t chorus_ranks_count(void* ranks) { return ((Ranks*)ranks)->count(); }
CHORUS_API void* chorus_ranks_word(void* ranks, int rank) { return ((Ranks*)ranks)->word(rank); }
CHORUS_API int chorus_ranks_sums(void* ranks) { return ((Ranks*)ranks)->sums(); }
CHORUS_API float* chorus_ranks_mine(void* ranks) { return ((Ranks*)ranks)->mine(); }
CHORUS_API const float* chorus_ranks_part(void* ranks, int rank) { return ((Ranks*)ranks)->part(rank); }
CHORUS_API void chorus_ranks_destroy(void* ranks) { delete (Ranks*)ranks; }

// An assistant: see lend.h. `desc` must outlive the call.
// Bytes of a value of x, of the model's `element`; elements from row to row of `width` values of so many bytes.
CHORUS_API int chorus_assist_input(int element) { return element == 2 ? sizeof(Act<bf16>) : sizeof(float); }
CHORUS_API int64_t chorus_assist_row(int bytes, int width) {
    return bytes == 2 ? spread<bf16>(width) : spread<float>(width);
}
CHORUS_API void chorus_assist_hand_over(void* ranks, void* handovers, int element, const float* x, int64_t rows,
                                        int64_t k) {
    if (element == 2) hand_over<bf16>(*(Ranks*)ranks, (Handover*)handovers, x, rows, k);
    else hand_over<float>(*(Ranks*)ranks, (Handover*)handovers, x, rows, k);
}
CHORUS_API void* chorus_assist_create(int element) {
    if (element == 2) return (AnyAssistant*)new Assistant<bf16>;
    return (AnyAssistant*)new Assistant<float>;
}
CHORUS_API void chorus_assist_serve(void* assistant, void* ranks, const AssistDesc* desc) {
    ((AnyAssistant*)assistant)->serve(*(Ranks*)ranks, *desc);
}
CHORUS_API void chorus_assist_destroy(void* assistant) { delete (AnyAssistant*)assistant; }

// The rows of a file, group by group: see file_rows.h. `jobs` stay the caller's and must outlive it, as must `fd`.
CHORUS_API void* chorus_rows_open(int fd, const Span* spans, const ReadGroup* groups, int64_t count,
                                  const ReadJob* jobs, int64_t element) {
    return new FileRows(fd, spans, groups, count, jobs, (Element)element);
}
CHORUS_API int chorus_rows_next(void* rows, void* out, ReadFault* fault) {
    return ((FileRows*)rows)->next(out, *fault);
}
CHORUS_API const char* chorus_rows_at(void* rows, int64_t start, int64_t bytes) {
    return ((FileRows*)rows)->at(start, bytes);
}
CHORUS_API void chorus_rows_close(void* rows) { delete (FileRows*)rows; }
}
