// The library's functions, as ops/cpu/native.py, ops/cpu/native_reader.py, ops/cpu/lora_offload.py and ops/ranks/ranks.py call them; one library for
// each level.
#pragma once
#include "sampling/ban.h"
#include "decoder.h"
#include "files/file_rows.h"
#include "files/gguf_blocks.h"
#include "mixers/gated_delta.h"
#include "program/layout.h"
#include "moe/mixture.h"
#include "gemm/multiply.h"
#include "gemm/pack.h"
#include "team/rates.h"
#include "supported.h"

#ifdef CHORUS_LIBRARY
using namespace chorus;

// run(zero): with a zero of the type that the library computes an element type in.
template <class Run>
static auto with_type(Element element, Run run) {
    return element == kBF16 ? run(bf16{}) : run(float{});
}

extern "C" {

// The layouts of all structures. count: their number, written.
CHORUS_API const Field* chorus_layout(int64_t* count) {
    *count = sizeof kLayout / sizeof *kLayout;
    return kLayout;
}

// Make a decoder.
//
//   element  of the model: kF32 or kBF16
//   model    copied, but not what it points to
//   threads  of its team, the caller's included
CHORUS_API AnyDecoder* chorus_decoder_create(Element element, const ModelDesc* model, int threads) {
    return with_type(element, [&](auto zero) { return decoder_of<decltype(zero)>(*model, threads); });
}

// Compute a step; see AnyDecoder, as of the functions below.
//
//   decoder  that computes
//   step     not written; the memory that it points to is, as StepDesc says
CHORUS_API void chorus_decoder_forward(AnyDecoder* decoder, const StepDesc* step) { decoder->forward(*step); }

// Compute logits of some of the last step's kept tokens.
//
//   decoder       that computed the step
//   first, count  of the tokens
//   logits        [count, logits_width of the step] float32: written
CHORUS_API void chorus_decoder_prompt_logits(AnyDecoder* decoder, int first, int count, float* logits) {
    decoder->prompt_logits(first, count, logits);
}

// Copy final hidden states of some of the last step's tokens: those with logits, and behind them the kept ones.
//
//   decoder       that computed the step
//   first, count  of these tokens
//   states        [count, hidden] float32: written
CHORUS_API void chorus_decoder_hidden_states(AnyDecoder* decoder, int first, int count, float* states) {
    decoder->hidden_states(first, count, states);
}

// Sample tokens, and compute log-probabilities.
//
//   decoder  with the threads
//   samples    [num_samples]
//   logprobs   [num_logprobs]
//   columns    logits of a row
CHORUS_API void chorus_decoder_sample(AnyDecoder* decoder, SampleRow* samples, int num_samples, LogprobRow* logprobs,
                                      int num_logprobs, int columns) {
    decoder->sample(samples, num_samples, logprobs, num_logprobs, columns);
}

// Set logits of tokens that may not come next to -inf.
//
//   logits  [·, stride] float32
//   stride  from row to row
//   vocab   tokens
//   masks   [count, words]: of each a row of the logits, then its mask; see ban.h
CHORUS_API void chorus_ban(float* logits, int64_t stride, int64_t vocab, const int32_t* masks, int64_t count,
                           int64_t words) {
    for (const int32_t* mask = masks; mask < masks + count * words; mask += words)
        ban(logits + mask[0] * stride, vocab, mask + 1);
}

// Write one matrix with adapters in it, between steps; returns how much longer its rows become, at most: see Merge.
//
//   decoder  of the model
//   desc     the matrix
CHORUS_API float chorus_decoder_merge(AnyDecoder* decoder, const MergeDesc* desc) { return decoder->merge(*desc); }

// Number of threads that the next step takes: all, or fewer while others keep the processors busy.
CHORUS_API int chorus_decoder_threads(AnyDecoder* decoder) { return decoder->threads(); }

// Join ranks before the first step.
//
//   decoder  of this rank's share
//   ranks    the caller's; must outlive the decoder
//   vocab    tokens of all ranks
CHORUS_API void chorus_decoder_join(AnyDecoder* decoder, Ranks* ranks, int vocab) { decoder->join(ranks, vocab); }

CHORUS_API void chorus_decoder_destroy(AnyDecoder* decoder) { delete decoder; }

// Bytes per second that threads read of a memory.
//
//   threads  each reads a part
//   memory   [bytes]
CHORUS_API double chorus_read_rate(int threads, const char* memory, int64_t bytes) {
    Team team(threads);
    return read_rate(team, memory, bytes);
}

// Floating-point operations per second of products.
//
//   threads  all at once
//   element  kF32 or kBF16
//   rounds   how often a register tile is multiplied
CHORUS_API double chorus_gemm_rate(int threads, Element element, int64_t rounds) {
    Team team(threads);
    return with_type(element, [&](auto zero) { return gemm_rate<decltype(zero)>(team, rounds); });
}

// Bytes per second that threads read and write of a memory, in place; parameters as of chorus_read_rate.
CHORUS_API double chorus_update_rate(int threads, char* memory, int64_t bytes) {
    Team team(threads);
    return update_rate(team, memory, bytes);
}

// Compute one layer of Gated DeltaNet; returns the seconds that it took.
//
//   threads  of a team for this call
//   desc     the layer and the step
//   times    that it is computed; the states go on
CHORUS_API double chorus_delta_run(int threads, const DeltaDesc* desc, int times) {
    Team team(threads);
    return run_delta<float>(team, threads, *desc, times);
}

// The team that the calling thread keeps.
static Team& own_team(int threads) {
    static thread_local OwnTeam own;
    return own.of(threads);
}

// Multiply rows by the matrices that they go to, on a team that the calling thread keeps; see multiply_each.
//
//   threads  of the team, the caller's included
//   element  of the matrices, or of the rows where those are whole numbers: kF32 or kBF16
//   other parameters as of multiply_each
CHORUS_API void chorus_multiply(int threads, Element element, int count, const int64_t* ends, const void* const* w,
                                const Integers* integers, const float* const* bias, int outputs, int inputs,
                                const float* x, float* y) {
    with_type(element, [&](auto zero) {
        multiply_each<decltype(zero)>(own_team(threads), count, ends, w, integers, bias, outputs, inputs, x, y);
    });
}

// Write weights in the order of panels, on a team that the calling thread keeps; see pack.
//
//   threads  of the team, the caller's included
//   other parameters as of pack
CHORUS_API void chorus_pack(int threads, const uint32_t* w, int64_t rows, int64_t words, uint32_t* out) {
    pack(own_team(threads), w, rows, words, out);
}

// Dequantise blocks of a GGUF file, on a team that the calling thread keeps; see gguf_blocks.h. Returns whether all
// numbers are finite; -1 where the type is none of them.
//
//   threads  of the team, the caller's included
//   type     ggml's number of the format
//   blocks   [count]
//   out      [count, numbers of a block] float32: written
CHORUS_API int chorus_gguf_blocks(int threads, int type, const uint8_t* blocks, int64_t count, float* out) {
    return dequantise_any<Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS>(
        own_team(threads), type, blocks, count, out);
}

// Compute a layer's mixture of experts, on a team that the calling thread keeps; see mix.
//
//   threads  of the team, the caller's included
//   element  of the experts' matrices, or of the rows where those are whole numbers: kF32 or kBF16
//   mixture  the layer
//   step     not written; the memory that it points to is
CHORUS_API void chorus_mix(int threads, Element element, const MixtureDesc* mixture, const MixtureStepDesc* step) {
    Team& team = own_team(threads);
    AnyMixtureLora* lora = nullptr;
    if (step->lora) {
        lora = with_type((Element)step->lora_element, [](auto zero) -> AnyMixtureLora* {
            static thread_local MixtureLora<decltype(zero)> own;
            return &own;
        });
        lora->begin(*step->lora, step->rows, team.most());
    }
    with_type(element, [&](auto zero) { mix<decltype(zero)>(team, *mixture, *step, lora); });
}

// Bytes of memory that ranks share; see ranks.h, as of the functions below.
//
//   size    ranks
//   floats  of a buffer
CHORUS_API int64_t chorus_ranks_bytes(int size, int64_t floats) { return Ranks::bytes(size, floats); }

// Make one rank; parameters as of Ranks. memory: must outlive it.
CHORUS_API Ranks* chorus_ranks_create(void* memory, int rank, int size, int64_t floats, double seconds,
                                      double spinning) {
    return new Ranks(memory, rank, size, floats, seconds, spinning);
}
CHORUS_API void chorus_ranks_begin(Ranks* ranks, int64_t step) { ranks->begin(step); }
CHORUS_API int chorus_ranks_add_up(Ranks* ranks, float* data, int64_t count) { return ranks->add_up(data, count); }
CHORUS_API int chorus_ranks_gather(Ranks* ranks, const float* part, int64_t rows, int64_t width, float* out) {
    return ranks->gather(part, rows, width, out);
}
CHORUS_API int chorus_ranks_state(Ranks* ranks) { return ranks->state(); }
CHORUS_API void chorus_ranks_fail(Ranks* ranks, int64_t step) { ranks->fail(step); }
CHORUS_API void chorus_ranks_lose(Ranks* ranks) { ranks->lose(); }
CHORUS_API int chorus_ranks_meet(Ranks* ranks) { return ranks->meet(); }
CHORUS_API int64_t chorus_ranks_count(Ranks* ranks) { return ranks->count(); }
CHORUS_API std::atomic<int64_t>* chorus_ranks_word(Ranks* ranks, int rank) { return ranks->word(rank); }
CHORUS_API int chorus_ranks_sums(Ranks* ranks) { return ranks->sums(); }
CHORUS_API float* chorus_ranks_mine(Ranks* ranks) { return ranks->mine(); }
CHORUS_API const float* chorus_ranks_part(Ranks* ranks, int rank) { return ranks->part(rank); }
CHORUS_API void chorus_ranks_destroy(Ranks* ranks) { delete ranks; }

// Bytes of a value of x that is handed over; see offload.h, as of the functions below. element: of the model.
CHORUS_API int chorus_offload_input(Element element) {
    return with_type(element, [](auto zero) { return (int)sizeof(Act<decltype(zero)>); });
}

// Elements from row to row of what is handed over.
//
//   element  of the rows: kF32 or kBF16
//   width    values of a row
CHORUS_API int64_t chorus_offload_row(Element element, int width) {
    return with_type(element, [&](auto zero) { return (int64_t)spread<decltype(zero)>(width); });
}

// Hand rows over, to measure it.
//
//   ranks      rank 0's
//   exchanges  [kMaxExchanges]
//   element    of the model: kF32 or kBF16
//   x          [rows, k] float32
CHORUS_API void chorus_offload_post(Ranks* ranks, Exchange* exchanges, Element element, const float* x, int64_t rows,
                                    int64_t k) {
    with_type(element, [&](auto zero) { post_exchange<decltype(zero)>(*ranks, exchanges, x, rows, (int)k); });
}

// Make all offload workers. element: of the model, kF32 or kBF16; ranks, cpus: see OffloadWorkers.
CHORUS_API AnyOffloadWorkers* chorus_offload_create(Element element, Ranks* ranks, const int32_t* cpus) {
    return with_type(element,
                     [&](auto zero) -> AnyOffloadWorkers* { return new OffloadWorkers<decltype(zero)>(*ranks, cpus); });
}
CHORUS_API void chorus_offload_begin(AnyOffloadWorkers* workers, const OffloadWorkersDesc* desc) {
    workers->begin(*desc);
}
CHORUS_API void chorus_offload_end(AnyOffloadWorkers* workers) { workers->end(); }
CHORUS_API void chorus_offload_destroy(AnyOffloadWorkers* workers) { delete workers; }

// Open the rows of a file, group by group; see FileRows, as of the functions below.
//
//   fd       open; must outlive them
//   spans    of all groups
//   groups   [count]
//   jobs     must outlive them
//   element  of the output
CHORUS_API FileRows* chorus_rows_open(int fd, const Span* spans, const ReadGroup* groups, int64_t count,
                                      const ReadJob* jobs, Element element) {
    return new FileRows(fd, spans, groups, count, jobs, element);
}

// Lay out the next group's rows; returns whether that was done.
//
//   rows   of the file
//   out    of the output's elements
//   fault  why not: written
CHORUS_API int chorus_rows_next(FileRows* rows, void* out, ReadFault* fault) { return rows->next(out, *fault); }

// Address of some of the file's bytes, of the group that was read last; null if they were not.
//
//   rows   of the file
//   start  first byte
//   bytes  their number
CHORUS_API const char* chorus_rows_at(FileRows* rows, int64_t start, int64_t bytes) { return rows->at(start, bytes); }
CHORUS_API void chorus_rows_close(FileRows* rows) { delete rows; }
}
#endif
