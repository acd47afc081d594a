// What both files of grouped products share: operands, experts' rows, and elements of the output.

struct Operands {
    // Rows of a together, columns of a, columns of the output.
    i64 rows, inner, n;
    int experts;
    int accumulate;
    const u32 *offsets;
    u64 *defects;
    Mixed out;
    // Whether 16 bytes of a row can be copied at once, and two elements of the output stored at once.
    int aligned;
    int paired;
};

enum Order { NT, NN, TN };

// Whether an expert's rows are rows of the matrix. A block skips its tile if they are not.
__device__ __forceinline__ bool rows_of(const Operands &p, int expert, i64 &begin, i64 &end) {
    begin = p.offsets[expert];
    end = p.offsets[expert + 1];
    if (begin <= end && end <= p.rows) return true;
    report(p.defects, DEFECT_ROW, (u32)(begin <= end ? end : begin), p.rows);
    return false;
}

__device__ __forceinline__ void finish(const Operands &p, i64 row, i64 col, float sum) {
    float x[1] = {sum}, before[1] = {0.0f};
    if (p.accumulate) load<1>(p.out, row, col, 1, before);
    x[0] += before[0];
    store<1>(p.out, row, col, 1, x);
}

// The same of two neighbours, the second of which may be outside.
__device__ __forceinline__ void finish_pair(const Operands &p, i64 row, i64 col, float first, float second) {
    if (p.paired && col + 1 < p.n) {
        i64 place = row * p.out.stride + col;
        float x[2] = {first, second}, before[2] = {0.0f, 0.0f};
        if (p.out.is_bf16) {
            bf16 *to = static_cast<bf16 *>(p.out.first) + place;
            if (p.accumulate) load<2>(to, 2, before);
            x[0] += before[0];
            x[1] += before[1];
            store<2>(to, 2, x);
        } else {
            float *to = static_cast<float *>(p.out.first) + place;
            if (p.accumulate) load<2>(to, 2, before);
            x[0] += before[0];
            x[1] += before[1];
            store<2>(to, 2, x);
        }
        return;
    }
    if (col < p.n) finish(p, row, col, first);
    if (col + 1 < p.n) finish(p, row, col + 1, second);
}
