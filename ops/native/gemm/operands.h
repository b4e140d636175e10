// Operands of products: rows of activations, a panel of weights, and the columns of outputs that a panel gives.
#pragma once
#include "simd/lanes.h"

namespace chorus {

// Rows of a matrix, which need not lie one right after the other.
//
//   data    element 0 of row 0
//   stride  elements from row to row
template <class E>
struct Rows {
    E* data;
    long stride;

    CHORUS_INLINE E* operator[](long row) const { return data + row * stride; }
    CHORUS_INLINE Rows from(long row, long column = 0) const { return {data + row * stride + column, stride}; }
    template <class F> CHORUS_INLINE operator Rows<F>() const { return {data, stride}; }  // of const elements
};

// Weights of kPanel outputs, or of the outputs from one of them on.
//
//   data  [k / pair, kPanel, pair]; pair: 2 in bf16, 1 in float32
//   k     inputs
template <class T>
struct Panel {
    const T* data;
    int k;
};

// The outputs that a panel gives.
//
//   y           [rows, columns] float32
//   columns     from 1 to kPanel; more of y's rows is not written
//   accumulate  true: the product is added to y
//   bias        [columns] float32 that is added as well; null: none
struct Outputs {
    Rows<float> y;
    int columns;
    bool accumulate;
    const float* bias;

    CHORUS_INLINE Outputs from(long row, int column = 0) const {
        return {y.from(row, column), columns - column, accumulate, bias ? bias + column : nullptr};
    }
};

}  // namespace chorus
