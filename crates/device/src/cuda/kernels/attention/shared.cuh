// What attention's kernels have in common: operands, masks, dropout, copies to shared memory.
//
// Shapes in comments: W is the head dimension rounded up to what is compiled for, the padding zero. A block has 128
// threads, four warps. Positions count from a segment's first key.

typedef unsigned char u8;

// A query none of whose keys has come yet subtracts this, not an infinity.
#define LOWEST (-1e30f)
#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f

#define THREADS 128
#define WARPS 4
#define LANES 32
#define MOST_SEGMENTS 384

extern __shared__ __align__(16) u8 memory[];

// One tensor's heads: head h of token t begins t * stride + h * step elements after the address.
struct Heads {
    u64 address;
    i64 stride;
    i64 step;
};

// Mirrored by `Parameters` in attention/parameters.rs.
struct Parameters {
    Heads q, k, v, out, dout, dq, dk, dv;
    // f32, a row of heads for each token; none where nobody asks for it.
    u64 logsum;
    i64 logsum_stride;
    // f32 [heads of this launch, tokens]: the products of dout and out.
    u64 delta;
    // f32 [heads of this launch, tiles of 64 queries, 64 · W]: sums of the queries' gradients, where blocks of keys add to
    // them in turn.
    u64 dq_sums;
    u64 seed;
    u64 first_head;
    u64 first_token;
    u32 tokens;
    u32 dim;
    // Query heads to a key head, and the first query head of this launch.
    u32 group;
    u32 head_start;
    // Rows of the cache for each sequence; 0 where keys lie beside queries.
    u32 capacity;
    u32 causal;
    // 0 for none.
    u32 window;
    // Whether all heads can be copied 16 bytes at a time, and results stored 4 bytes at a time.
    u32 aligned;
    float scale;
    // Dropped are weights whose sixteen random bits, above sixteen others, are less than this; 0 drops none.
    u32 dropped_below;
    // Weights that stay are multiplied by this.
    float kept;
    u32 segments;
    u32 offsets[MOST_SEGMENTS + 1];
    // Tokens of each sequence that come before its queries.
    u32 cached[MOST_SEGMENTS];
    // The scores' cap and its inverse; 0 for none.
    float cap;
    float inverse_cap;
    u32 unused;
    // f32, a number of each query head; none where nobody asks for it.
    u64 slopes, sinks, dsinks;
};

// A block's segment and its tile of queries or keys.
struct Tile {
    // The segment's first query token; its number of queries, and how many keys come before them.
    int first_query, queries, before;
    // The row of its first key; its number of keys.
    i64 first_key;
    int keys;
    // The tile's first query or key, counted from the segment's first.
    int start;
};

// Tiles of `size`: segment s begins with tile (offsets[s] - offsets[0]) / size + s, so a few at the segments' ends are
// empty. Returns false for those.
__device__ __forceinline__ bool find_tile(const Parameters &p, u32 number, u32 size, Tile &tile) {
    u32 low = 0, high = p.segments - 1;
    while (low < high) {
        u32 middle = (low + high + 1) / 2;
        if ((p.offsets[middle] - p.offsets[0]) / size + middle <= number) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    tile.first_query = p.offsets[low];
    tile.queries = p.offsets[low + 1] - p.offsets[low];
    tile.before = p.cached[low];
    tile.first_key = p.capacity ? (i64)low * p.capacity : tile.first_query;
    tile.keys = tile.before + tile.queries;
    tile.start = (number - ((p.offsets[low] - p.offsets[0]) / size + low)) * size;
    return tile.start < tile.queries;
}

// The keys that the query at a position sees.
__device__ __forceinline__ int first_seen(const Parameters &p, int position) {
    return p.window ? max(0, position + 1 - (int)p.window) : 0;
}

__device__ __forceinline__ int end_seen(const Parameters &p, int position, int keys) {
    if (p.causal) {
        return position + 1;
    }
    return p.window ? min(position + (int)p.window, keys) : keys;
}

// The queries that see any key of a range: segments whose queries have no keys before them.
__device__ __forceinline__ int first_seeing(const Parameters &p, int first_key) {
    if (p.causal) {
        return first_key;
    }
    return p.window ? max(0, first_key + 1 - (int)p.window) : 0;
}

__device__ __forceinline__ int end_seeing(const Parameters &p, int last_key, int queries) {
    return p.window ? min(queries, last_key + (int)p.window) : queries;
}

// The key of a query's random numbers.
__device__ __forceinline__ u64 noise_of(const Parameters &p, int head, int token) {
    return seed_of(seed_of(p.seed, p.first_head + head), p.first_token + token);
}

// The word of a query and two keys, eight apart: see cpu/attention/dropout.rs, whose integers these are. Pair 8 i + j is of
// the keys 16 i + j and 16 i + j + 8, which a lane has together, whether keys are a product's columns or its rows.
__device__ __forceinline__ u32 pair_word(u64 noise, u32 pair) {
    u32 x = pair + (u32)noise;
    x = (x ^ (x >> 16)) * 0x7feb352du + (u32)(noise >> 32);
    return (x ^ (x >> 15)) * 0x846ca68bu;
}

// Sixteen bits of the word decide on each of the two; those below do not matter where a word is compared.
__device__ __forceinline__ bool drops_first(const Parameters &p, u32 word) {
    return word < p.dropped_below;
}

__device__ __forceinline__ bool drops_second(const Parameters &p, u32 word) {
    return (word ^ (word << 16)) < p.dropped_below;
}

__device__ __forceinline__ bool is_dropped(const Parameters &p, u64 noise, int key) {
    u32 word = pair_word(noise, key / 16 * 8 + key % 8);
    return (key & 8 ? word ^ (word << 16) : word) < p.dropped_below;
}

// ScoreChanges are changed before the softmax in kernels that are compiled with CHANGES: see `ScoreChanges` in kernel/attention.rs.

__device__ __forceinline__ float slope_of(const Parameters &p, int head) {
    return p.slopes ? ((const float *)p.slopes)[head] : 0;
}

__device__ __forceinline__ float sink_of(const Parameters &p, int head) {
    return p.sinks ? ((const float *)p.sinks)[head] : -INFINITY_F32;
}

// A changed score, and its derivative by the scaled one.
struct Changed {
    float score, derivative;
};

// Scales and changes a product of a query and the key that lies so far after it. A hidden one stays minus infinity.
__device__ __forceinline__ Changed changed(const Parameters &p, float product, float slope, int distance) {
    if (product == -INFINITY_F32) {
        return {product, 0};
    }
    float score = product * p.scale, derivative = 1;
    if (p.cap > 0) {
        float share = tanhf(score * p.inverse_cap);
        score = share * p.cap;
        derivative = 1 - share * share;
    }
    return {fmaf(slope, (float)distance, score), derivative};
}

__device__ __forceinline__ float logsum_of(const Parameters &p, int token, int head) {
    return ((const float *)p.logsum)[token * p.logsum_stride + head];
}

__device__ __forceinline__ float delta_of(const Parameters &p, int token, int head) {
    return ((const float *)p.delta)[(i64)(head - p.head_start) * p.tokens + token];
}
