// Time to first token of prompts that llama.cpp computes, and of the same prompts from the files of a slot.
//
// A slot's `save` and `restore` are the calls used here. The sequences' tokens come from standard input, a prompt per
// line. Each is computed whole; then what its last QUESTION tokens add is taken away and the rest is saved. At the end each
// file is restored and those tokens computed. Prints one line of JSON.
//
// slots MODEL FOLDER THREADS LENGTH QUESTION < PROMPTS

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "llama.h"

namespace {

using Prompt = std::vector<llama_token>;

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

[[noreturn]] void fail(const char * what) {
    std::fprintf(stderr, "%s failed\n", what);
    std::exit(1);
}

int best_of(llama_context * context, int vocab) {
    const float * logits = llama_get_logits_ith(context, -1);
    int best = 0;
    for (int token = 1; token < vocab; ++token) {
        if (logits[token] > logits[best]) best = token;
    }
    return best;
}

void compute(llama_context * context, llama_token * tokens, int count) {
    if (llama_decode(context, llama_batch_get_one(tokens, count))) fail("llama_decode");
}

void print(const char * name, const std::vector<double> & seconds) {
    std::printf("\"%s\": [", name);
    for (size_t at = 0; at < seconds.size(); ++at) std::printf("%s%.6f", at ? ", " : "", seconds[at]);
    std::printf("], ");
}

}  // namespace

int main(int argc, char ** argv) {
    if (argc != 6) fail("reading MODEL FOLDER THREADS LENGTH QUESTION");
    const std::string folder = argv[2];
    const int threads = std::atoi(argv[3]), length = std::atoi(argv[4]), question = std::atoi(argv[5]);
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    std::vector<Prompt> prompts;
    for (int token; std::scanf("%d", &token) == 1;) {
        if (prompts.empty() || int(prompts.back().size()) == length) prompts.emplace_back();
        prompts.back().push_back(token);
    }

    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!model) fail("llama_model_load_from_file");
    llama_context_params params = llama_context_default_params();
    params.n_ctx = params.n_batch = length + 255 & ~255;
    params.n_ubatch = 512;
    params.n_seq_max = 1;
    params.n_threads = params.n_threads_batch = threads;
    llama_context * context = llama_init_from_model(model, params);
    if (!context) fail("llama_init_from_model");
    llama_memory_t memory = llama_get_memory(context);
    const int vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));

    std::vector<double> computed, saved, restored;
    std::vector<int> first;
    size_t bytes = 0, equal = 0;
    for (size_t at = 0; at < prompts.size(); ++at) {
        Prompt & prompt = prompts[at];
        llama_memory_clear(memory, true);
        double began = now();
        compute(context, prompt.data(), length);
        first.push_back(best_of(context, vocab));
        computed.push_back(now() - began);
        if (!llama_memory_seq_rm(memory, 0, length - question, -1)) fail("llama_memory_seq_rm");
        began = now();
        const std::string path = folder + "/" + std::to_string(at);
        const size_t size = llama_state_seq_save_file(context, path.c_str(), 0, prompt.data(), length - question);
        if (!size) fail("llama_state_seq_save_file");
        bytes += size;
        saved.push_back(now() - began);
    }
    for (size_t at = 0; at < prompts.size(); ++at) {
        llama_memory_clear(memory, true);
        Prompt found(length);
        size_t count = 0;
        const double began = now();
        const std::string path = folder + "/" + std::to_string(at);
        if (!llama_state_seq_load_file(context, path.c_str(), 0, found.data(), length, &count)) fail("llama_state_seq_load_file");
        if (count + question != size_t(length)) fail("reading all tokens of a file");
        compute(context, &prompts[at][length - question], question);
        equal += best_of(context, vocab) == first[at];
        restored.push_back(now() - began);
    }
    std::printf("{");
    print("computed", computed);
    print("saved", saved);
    print("restored", restored);
    std::printf("\"bytes\": %zu, \"equal\": %zu}\n", bytes, equal);
    llama_free(context);
    llama_model_free(model);
}
