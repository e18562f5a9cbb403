// Shared by the kernels of twenty.metal, which includes it as a neighbour.
#ifndef SHAPES_H
#define SHAPES_H

#define CEIL_DIV(a, b) (((a) + (b) - 1) / (b))

typedef struct {
    uint rows;
    uint keys;
    uint heads;
    float scale;
} Shape;

struct Span {
    uint first, last;

    bool holds(uint i) const { return i >= first && i < last; }
    uint length() const { return last - first; }
};

static inline uint row_of(constant Shape& s, uint i) { return i / s.keys; }

#endif
