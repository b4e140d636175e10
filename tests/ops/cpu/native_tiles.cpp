// Prints what GEMMs by tiles give, with the tile registers of AMX as its manual defines them: for machines without them.
#include "gemm/tiles.h"
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

using namespace chorus;

namespace {

struct Register {
    int rows = 0, row_bytes = 0;
    uint8_t bytes[16][64] = {};
};

struct EmulatedTiles {
    static inline Register registers[8];
    static inline bool configured = false;

    static void configure(int upper, int lower) {
        const int rows[8] = {upper, upper, lower, lower, upper, lower, kTileDepth / 2, kTileDepth / 2};
        for (int tile = 0; tile < 8; tile++) registers[tile] = Register{rows[tile], rows[tile] ? 64 : 0, {}};
        configured = true;
    }
    static void release() { configured = false; }
    // A register that is not configured for it faults.
    static Register& used(int tile) {
        if (!configured || !registers[tile].rows) std::abort();
        return registers[tile];
    }
    template <int TILE> static void zero() { memset(used(TILE).bytes, 0, sizeof registers[TILE].bytes); }
    template <int TILE> static void load(const void* from, long row_bytes) {
        for (int r = 0; r < used(TILE).rows; r++)
            memcpy(registers[TILE].bytes[r], (const char*)from + r * row_bytes, 64);
    }
    template <int TILE> static void store(void* to, long row_bytes) {
        for (int r = 0; r < used(TILE).rows; r++) memcpy((char*)to + r * row_bytes, registers[TILE].bytes[r], 64);
    }
    // TDPBF16PS of Intel's manual, volume 2: subnormal numbers are 0 before and after each step.
    template <int SUMS, int ROWS, int COLUMNS> static void multiply() {
        const Register &a = used(ROWS), &b = used(COLUMNS);
        Register& c = used(SUMS);
        if (a.rows != c.rows || b.rows != a.row_bytes / 4) std::abort();
        auto flushed = [](float v) { return std::fabs(v) < 1.17549435e-38f ? 0 * v : v; };
        auto element = [&](const Register& of, int row, int i) {
            bf16 v;
            memcpy(&v, of.bytes[row] + 2 * i, 2);
            return flushed(widen(v));
        };
        for (int m = 0; m < c.rows; m++)
            for (int n = 0; n < c.row_bytes / 4; n++) {
                float even = 0, odd = 0, sum;
                for (int k = 0; k < b.rows; k++) {
                    even = flushed(std::fma(element(a, m, 2 * k), element(b, k, 2 * n), even));
                    odd = flushed(std::fma(element(a, m, 2 * k + 1), element(b, k, 2 * n + 1), odd));
                }
                memcpy(&sum, c.bytes[m] + 4 * n, 4);
                sum = flushed(flushed(sum) + flushed(even + odd));
                memcpy(c.bytes[m] + 4 * n, &sum, 4);
            }
    }
};

// A register file that takes a panel's halves for each other.
struct WrongTiles : EmulatedTiles {
    template <int SUMS, int ROWS, int COLUMNS> static void multiply() {
        EmulatedTiles::multiply<SUMS, ROWS, 13 - COLUMNS>();
    }
};

float random_number() { return (float)std::rand() / RAND_MAX - 0.5f; }
bf16 narrow(float v) {
    uint32_t bits;
    memcpy(&bits, &v, 4);
    return (bf16)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

}  // namespace

int main() {
    std::printf("exact %d\n", tiles_are_exact<EmulatedTiles>());
    std::printf("wrong %d\n", !tiles_are_exact<WrongTiles>());
    double worst = 0;
    bool alone = true;
    for (const int k : {64, 200, 768})
        for (const int rows : {1, 16, 31, 77}) {
            std::vector<bf16> x(rows * k), panel(k * kTilePanel);
            for (auto& v : x) v = narrow(random_number());
            for (auto& v : panel) v = narrow(random_number());
            std::vector<float> y(rows * kTilePanel), one(kTilePanel);
            const Panel<bf16> w{panel.data(), k};
            tiles_gemm<EmulatedTiles>({x.data(), k}, rows, w, {{y.data(), kTilePanel}, kTilePanel, false, nullptr},
                                         0);
            for (int r = 0; r < rows; r++) {
                tiles_gemm<EmulatedTiles>({x.data() + r * k, k}, 1, w,
                                             {{one.data(), kTilePanel}, kTilePanel, false, nullptr}, 0);
                alone &= !memcmp(one.data(), y.data() + r * kTilePanel, kTilePanel * sizeof(float));
                for (int c = 0; c < kTilePanel; c++) {
                    double sum = 0, size = 0;
                    for (int i = 0; i < k; i++) {
                        const double part =
                            (double)widen(x[r * k + i]) * widen(panel[(i / 2 * kTilePanel + c) * 2 + i % 2]);
                        sum += part, size += std::fabs(part);
                    }
                    worst = std::max(worst, std::fabs(sum - y[r * kTilePanel + c]) / size);
                }
            }
        }
    std::printf("alone %d\nworst %.3g\n", alone, worst);
}
