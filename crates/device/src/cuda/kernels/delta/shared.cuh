// What the delta rule's kernels have in common: operands, chunks and gates.
//
// Names and formulas are those of cpu/delta/chunk.rs. Shapes in comments: K and V of heads, C rows of a chunk, nv value heads.

#define CHUNK 64
#define MOST_SEGMENTS 384
#define EPSILON 1e-6f

typedef unsigned char u8;

extern __shared__ __align__(128) u8 memory[];

// One tensor's heads: head h of token t begins t * stride + h * step elements after the address.
struct Heads {
    u64 address;
    i64 stride;
    i64 step;
};

// A row of heads for each token.
struct Gate {
    u64 address;
    i64 stride;
};

// Mirrored by `Parameters` in delta/parameters.rs.
struct Parameters {
    Heads q, k, v, out, dout, dq, dk, dv;
    Gate fade, take, dfade, dtake;
    u64 log_rate, bias;
    // f32 [segments · nv · K, V]; 0 for none.
    u64 states;
    i64 states_stride;
    // Working memory, an item for each value head of each slot: f32 [NUMBERS, C], then bf16 T and P, [C, C] each.
    u64 numbers, squares;
    // bf16 [V, K] of whole widths: Sᵀ before the chunk, and the gradient of Sᵀ after it.
    u64 befores, afters;
    // f32 [V + K, K] for each value head of each stretch: see `border_at`.
    u64 borders;
    // bf16 [C, V] of whole widths: N, what its rounding left, and X.
    u64 news, rests, errors;
    // Of the two gates' vectors: f64 shares of each slot's or segment's value heads, two by two.
    u64 sums;
    u64 dlog_rate, dbias;
    u32 key, value, heads, ratio;
    // V in whole widths.
    u32 padded_value;
    // Whether all heads can be moved 16 bytes at a time.
    u32 aligned;
    // Segments of up to so many tokens are left to others.
    u32 few;
    // Tiles of a ring in shared memory.
    u32 stages;
    // Tokens of a stretch, whole chunks: a segment's stretches run side by side.
    u32 stretch;
    // Tokens of all launches; the number of their slots, or of segments.
    u32 tokens;
    u32 shares;
    // The number of this launch's first segment.
    u32 first_segment;
    u32 segments;
    u32 offsets[MOST_SEGMENTS + 1];
};

// A chunk's tokens, and the number of its slot.
struct Chunk {
    i64 slot;
    int first, count;
};

// Slots are for so many tokens each, a chunk's or a stretch's. Segment s begins with slot offsets[s] / tokens + s, so a few at the
// segments' ends are empty.
__device__ __forceinline__ i64 first_slot(const Parameters &p, u32 segment, u32 tokens = CHUNK) {
    return p.offsets[segment] / tokens + p.first_segment + segment;
}

__device__ __forceinline__ int slots_of(const Parameters &p) { return (int)(first_slot(p, p.segments) - first_slot(p, 0)); }

__device__ __forceinline__ u32 segment_of(const Parameters &p, i64 slot, u32 tokens = CHUNK) {
    u32 low = 0, high = p.segments - 1;
    while (low < high) {
        u32 middle = (low + high + 1) / 2;
        if (first_slot(p, middle, tokens) <= slot)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

// The chunk of a block's slot. Returns false for empty ones.
__device__ __forceinline__ bool find_chunk(const Parameters &p, u32 number, Chunk &chunk) {
    chunk.slot = first_slot(p, 0) + number;
    u32 segment = segment_of(p, chunk.slot);
    int start = p.offsets[segment], end = p.offsets[segment + 1];
    chunk.first = start + (int)(chunk.slot - first_slot(p, segment)) * CHUNK;
    chunk.count = min(CHUNK, end - chunk.first);
    return chunk.count > 0 && end - start > p.few;
}

__device__ __forceinline__ float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

__device__ __forceinline__ float exact_sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

template <class T> __device__ __forceinline__ T *gate_at(const Gate &gate, i64 token, int head) {
    return (T *)gate.address + token * gate.stride + head;
}

template <class T> __device__ __forceinline__ T *head_at(const Heads &heads, i64 token, int head) {
    return (T *)heads.address + token * heads.stride + head * heads.step;
}

__device__ __forceinline__ float *state_at(const Parameters &p, int segment, int head, int row, int col) {
    i64 first = ((i64)(p.first_segment + segment) * p.heads + head) * p.key;
    return (float *)p.states + (first + row) * p.states_stride + col;
}

// Stretches of a segment that blocks go through chunk by chunk; 0 for those that are left to others.
__device__ __forceinline__ int stretches_of(const Parameters &p, int segment) {
    u32 tokens = p.offsets[segment + 1] - p.offsets[segment];
    return tokens > p.few ? (int)((tokens + p.stretch - 1) / p.stretch) : 0;
}

__device__ __forceinline__ float number_of_head(u64 vector, int head) { return ((const float *)vector)[head]; }
