// A product for each expert by Hopper's warpgroups: what grouped_product.cu computes, of bf16 operands whose rows begin at multiples
// of 16 bytes.
//
// A block stays on its multiprocessor and takes each tile of the output whose number is its own plus a multiple of the blocks. One
// thread has the copy engine fetch both operands along the summed dimension, in a ring of stages; two warpgroups multiply, of 64
// rows of the tile each. The output goes through shared memory, so the copy engine also stores it, while the next tile is computed.
//
// Tiles in shared memory have rows of 64 elements, 128 bytes, whose chunks of 16 bytes are exchanged by the row's number. Their rows
// lie across the summed dimension, or along it: then one [DEPTH, 64] box after the other.

#define HEIGHT 128
#define DEPTH 64
#define ROW_BYTES 128
#define BOX_BYTES (DEPTH * ROW_BYTES)
#define GROUP_THREADS 128
#define BLOCK_THREADS (3 * GROUP_THREADS)
#define STAGES 3
// A warp stores two boxes of sixteen rows at once, while two others are on their way.
#define STORED_ROWS 16
#define STORED_BOX (STORED_ROWS * ROW_BYTES)
#define STORED_AT_ONCE 2
#define WARP_STORED (2 * STORED_AT_ONCE * STORED_BOX)
// Experts that are sorted by their rows at most.
#define MOST_SORTED 512

#define EIGHT_PARTS(kind, i) \
    PART(kind, i), PART(kind, i + 1), PART(kind, i + 2), PART(kind, i + 3), PART(kind, i + 4), PART(kind, i + 5), \
        PART(kind, i + 6), PART(kind, i + 7)
#define NAMES_OF_FIRST_128 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
    "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, " \
    "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_OF_LAST_128 \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, " \
    "%86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, " \
    "%106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, " \
    "%124, %125, %126, %127"

// sums [64, N] += left [64, 16] · right [16, N]. An operand lies ACROSS if its rows are summands.
template <int LEFT_ACROSS, int RIGHT_ACROSS>
__device__ __forceinline__ void add_product(float (&sums)[32][4], u64 left, u64 right) {
    asm volatile("{\n.reg .pred adds;\nsetp.eq.b32 adds, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" NAMES_OF_FIRST_128 ", " NAMES_OF_LAST_128
                 "}, %128, %129, adds, 1, 1, %130, %131;\n}\n"
                 : EIGHT_PARTS("+f", 0), EIGHT_PARTS("+f", 8), EIGHT_PARTS("+f", 16), EIGHT_PARTS("+f", 24)
                 : "l"(left), "l"(right), "n"(LEFT_ACROSS), "n"(RIGHT_ACROSS));
}

template <int LEFT_ACROSS, int RIGHT_ACROSS>
__device__ __forceinline__ void add_product(float (&sums)[16][4], u64 left, u64 right) {
    asm volatile("{\n.reg .pred adds;\nsetp.eq.b32 adds, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NAMES_OF_FIRST_128
                 "}, %64, %65, adds, 1, 1, %66, %67;\n}\n"
                 : EIGHT_PARTS("+f", 0), EIGHT_PARTS("+f", 8)
                 : "l"(left), "l"(right), "n"(LEFT_ACROSS), "n"(RIGHT_ACROSS));
}

// A description moves by this to the next sixteen summands, which are columns or rows.
template <int ACROSS> __device__ __forceinline__ u64 next_summands() {
    return (ACROSS ? 16 * ROW_BYTES : 16 * sizeof(bf16)) >> 4;
}

// How products find an operand: as `described`, with a box after the other where its rows are summands.
template <int ACROSS> __device__ __forceinline__ u64 described_boxes(u32 tile) {
    return described(tile) - (1ull << 16) + ((ACROSS ? BOX_BYTES >> 4 : 1ull) << 16);
}

__device__ __forceinline__ u32 chunk_place(int row, int chunk) { return row * ROW_BYTES + (chunk ^ row % 8) * 16; }

// The tiles of this block in their order, which is that of all experts' tiles.
template <int ORDER, int WIDTH> struct Walk {
    // Experts by their places among all, or null if they are in their own order.
    const u16 *order;
    u32 columns, round = 0;
    int place = -1, expert = 0;
    // The expert's rows of pairs, and the numbers of its tiles.
    i64 begin = 0, end = 0;
    i64 first = 0, count = 0;
    // The tile's place in the expert's output.
    i64 row = 0, col = 0;

    __device__ __forceinline__ Walk(const Operands &p, const u16 *order)
        : order(order), columns((u32)((p.n + WIDTH - 1) / WIDTH)) {}

    // Goes on to the next tile, if there is one. All lanes of a warp call it.
    __device__ __forceinline__ bool next(const Operands &p) {
        // Every other round goes backwards, so that no block always has the largest tiles.
        i64 number = (i64)round * gridDim.x + (round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
        round++;
        while (number >= first + count) {
            first += count;
            if (++place >= p.experts) return false;
            expert = order ? order[place] : place;
            bool are_rows = rows_of(p, expert, begin, end);
            i64 height = !are_rows ? 0 : ORDER == TN ? p.inner : end - begin;
            count = (height + HEIGHT - 1) / HEIGHT * columns;
        }
        u32 inside = (u32)(number - first);
        row = (i64)(inside / columns) * HEIGHT;
        col = (i64)(inside % columns) * WIDTH;
        return true;
    }

    __device__ __forceinline__ int depth(const Operands &p) const { return (int)(ORDER == TN ? end - begin : p.inner); }
};

// A place in the ring of stages, and how often it was passed.
struct Ring {
    u32 stage = 0, parity = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

struct Barriers {
    // Of each stage: whether it is full, and whether it may be filled.
    u32 full, empty;
    __device__ __forceinline__ u32 full_at(u32 stage) const { return full + 8 * stage; }
    __device__ __forceinline__ u32 empty_at(u32 stage) const { return empty + 8 * stage; }
};

template <int ORDER, int WIDTH>
__device__ __forceinline__ void fetch_tiles(const Operands &p, const TensorMap &a, const TensorMap &b, const u16 *order,
                                            u32 stages, Barriers barriers) {
    const u32 left_bytes = HEIGHT * ROW_BYTES, stage_bytes = left_bytes + WIDTH * ROW_BYTES;
    prefetch_map(a);
    prefetch_map(b);
    Walk<ORDER, WIDTH> walk(p, order);
    Ring ring;
    while (walk.next(p)) {
        int begin = (int)walk.begin, row = (int)walk.row, col = (int)walk.col, depth = walk.depth(p);
        // One lane fetches; the others wait for it where the next tile is looked for.
        for (int at = 0; at < depth && threadIdx.x == 0; at += DEPTH) {
            wait_barrier(barriers.empty_at(ring.stage), ring.parity ^ 1);
            u32 left = stages + ring.stage * stage_bytes, right = left + left_bytes, full = barriers.full_at(ring.stage);
            expect_bytes(full, stage_bytes);
            if (ORDER == TN) {
#pragma unroll
                for (int i = 0; i < HEIGHT / 64; i++)
                    copy_box(left + i * BOX_BYTES, a, row + i * 64, begin + at, 0, full);
            } else {
                copy_box(left, a, at, begin + row, 0, full);
            }
            if (ORDER == NT) {
                copy_box(right, b, at, col, walk.expert, full);
            } else {
#pragma unroll
                for (int i = 0; i < WIDTH / 64; i++) {
                    if (ORDER == NN)
                        copy_box(right + i * BOX_BYTES, b, col + i * 64, at, walk.expert, full);
                    else
                        copy_box(right + i * BOX_BYTES, b, col + i * 64, begin + at, 0, full);
                }
            }
            ring.advance();
        }
    }
}

// Zeros in the rows [from, to) of so many boxes, by a warpgroup.
template <int BOXES> __device__ __forceinline__ void clear_rows(u32 boxes, int from, int to) {
    int chunks = (to - from) * 8;
    for (int i = threadIdx.x % GROUP_THREADS; i < chunks; i += GROUP_THREADS) {
#pragma unroll
        for (int box = 0; box < BOXES; box++)
            asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};\n" ::"r"(boxes + box * BOX_BYTES + from * ROW_BYTES +
                                                                           i * 16),
                         "r"(0)
                         : "memory");
    }
}

// Columns of a warp's sums from `first` on, as many as 128 bytes hold, to shared memory.
template <int WIDTH>
__device__ __forceinline__ void fill_box(const float (&sums)[WIDTH / 8][4], int first, u32 box, const bf16 *) {
    int row = threadIdx.x % 16, half = threadIdx.x % 32 / 16;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float(&x)[4] = sums[first / 8 + 2 * i], (&y)[4] = sums[first / 8 + 2 * i + 1];
        u32 pairs[4] = {rounded_pair(x[0], x[1]), rounded_pair(x[2], x[3]), rounded_pair(y[0], y[1]),
                        rounded_pair(y[2], y[3])};
        store_matrices(pairs, box + chunk_place(row, 2 * i + half));
    }
}

template <int WIDTH>
__device__ __forceinline__ void fill_box(const float (&sums)[WIDTH / 8][4], int first, u32 box, const float *) {
    int row = threadIdx.x % 32 / 4, pair = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float(&x)[4] = sums[first / 8 + i];
        u32 to = box + chunk_place(row, 2 * i + pair / 2) + pair % 2 * 8;
#pragma unroll
        for (int half = 0; half < 2; half++)
            asm volatile("st.shared.v2.f32 [%0], {%1, %2};\n" ::"r"(to + half * 8 * ROW_BYTES), "f"(x[2 * half]),
                         "f"(x[2 * half + 1])
                         : "memory");
    }
}

// The first rows of a box to the output, where the rows behind them are another expert's.
template <class T>
__device__ __forceinline__ void store_rows(const Operands &p, u32 box, int rows, i64 row, i64 col) {
    const int chunk_elements = 16 / sizeof(T);
    for (int i = threadIdx.x % 32; i < rows * 8; i += 32) {
        i64 at = col + i % 8 * chunk_elements;
        if (at >= p.n) continue;
        float4 x;
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];\n"
                     : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                     : "r"(box + chunk_place(i / 8, i % 8))
                     : "memory");
        float4 *to = reinterpret_cast<float4 *>(static_cast<T *>(p.out.first) + (row + i / 8) * p.out.stride + at);
        if (sizeof(T) == sizeof(float) && p.accumulate) {
            float4 before = *to;
            x = make_float4(before.x + x.x, before.y + x.y, before.z + x.z, before.w + x.w);
        }
        *to = x;
    }
}

// Where a warp's sums belong: up to sixteen rows of the output, which are an expert's, or one of which is not.
struct Place {
    i64 row, col;
    int rows, expert;
};

template <class T, int ORDER, int WIDTH>
__device__ __forceinline__ void store_sums(const Operands &p, const TensorMap &out, const float (&sums)[WIDTH / 8][4],
                                           const Place &place, u32 stored, u32 &turn) {
    const int columns = ROW_BYTES / sizeof(T);
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int part = 0; part < WIDTH; part += STORED_AT_ONCE * columns) {
        u32 boxes = stored + turn * STORED_AT_ONCE * STORED_BOX;
        turn ^= 1;
        if (lane == 0) wait_stores<1>();
        __syncwarp();
#pragma unroll
        for (int i = 0; i < STORED_AT_ONCE; i++)
            fill_box<WIDTH>(sums, part + i * columns, boxes + i * STORED_BOX, (const T *)nullptr);
        show_to_products();
        __syncwarp();
#pragma unroll
        for (int i = 0; i < STORED_AT_ONCE; i++) {
            i64 col = place.col + part + i * columns;
            u32 box = boxes + i * STORED_BOX;
            if (col >= p.n) continue;
            // The tensor of TN's output has an end of rows at every expert's.
            if (ORDER != TN && place.rows < STORED_ROWS) {
                store_rows<T>(p, box, place.rows, place.row, col);
            } else if (lane == 0) {
                int row = (int)place.row, group = ORDER == TN ? place.expert : 0;
                if (sizeof(T) == sizeof(float) && p.accumulate)
                    add_box(out, box, (int)col, row, group);
                else
                    store_box(out, box, (int)col, row, group);
            }
        }
        if (lane == 0) commit_stores();
    }
}

template <int ORDER, int WIDTH>
__device__ __forceinline__ void multiply_tiles(const Operands &p, const TensorMap &out, const u16 *order, u32 stages,
                                               u32 stored, Barriers barriers) {
    const int left_across = ORDER == TN, right_across = ORDER != NT;
    const u32 left_bytes = HEIGHT * ROW_BYTES, stage_bytes = left_bytes + WIDTH * ROW_BYTES;
    int group = threadIdx.x / GROUP_THREADS - 1, warp = threadIdx.x % GROUP_THREADS / 32, lane = threadIdx.x % 32;
    u32 own_stored = stored + (group * 4 + warp) * WARP_STORED, turn = 0;
    Walk<ORDER, WIDTH> walk(p, order);
    Ring ring;
    bool is_there = walk.next(p);
    while (is_there) {
        i64 row = walk.row + group * 64;
        i64 rows = (ORDER == TN ? p.inner : walk.end - walk.begin) - row;
        int depth = walk.depth(p);
        if (rows <= 0) {
            for (int at = 0; at < depth; at += DEPTH) {
                wait_barrier(barriers.full_at(ring.stage), ring.parity);
                if (lane == 0) arrive(barriers.empty_at(ring.stage));
                ring.advance();
            }
            is_there = walk.next(p);
            continue;
        }
        rows -= warp * STORED_ROWS;
        row += warp * STORED_ROWS + (ORDER == TN ? 0 : walk.begin);
        Place place = {row, walk.col, (int)(rows < STORED_ROWS ? rows : STORED_ROWS), walk.expert};
        float sums[WIDTH / 8][4];
#pragma unroll
        for (int i = 0; i < WIDTH / 8; i++) sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = 0.0f;
        // Rows of other experts are no summands, nor is what lies behind the last.
        int whole = ORDER == TN ? depth / DEPTH * DEPTH : depth;
        u32 last_stage = 0;
        for (int at = 0; at < whole; at += DEPTH) {
            wait_barrier(barriers.full_at(ring.stage), ring.parity);
            u32 left = stages + ring.stage * stage_bytes + group * BOX_BYTES;
            u32 right = stages + ring.stage * stage_bytes + left_bytes;
            u64 lefts = described_boxes<left_across>(left), rights = described_boxes<right_across>(right);
            begin_products();
#pragma unroll
            for (int i = 0; i < DEPTH / 16; i++)
                add_product<left_across, right_across>(sums, lefts + i * next_summands<left_across>(),
                                                       rights + i * next_summands<right_across>());
            commit_products();
            wait_products<1>();
            // The products before these are done.
            if (at > 0 && lane == 0) arrive(barriers.empty_at(last_stage));
            last_stage = ring.stage;
            ring.advance();
        }
        // While the last products run.
        is_there = walk.next(p);
        wait_products<0>();
        settle(sums);
        if (whole > 0 && lane == 0) arrive(barriers.empty_at(last_stage));
        if (ORDER == TN && whole < depth) {
            wait_barrier(barriers.full_at(ring.stage), ring.parity);
            u32 left = stages + ring.stage * stage_bytes + group * BOX_BYTES;
            u32 right = stages + ring.stage * stage_bytes + left_bytes;
            int rest = depth - whole, steps = (rest + 15) / 16;
            clear_rows<1>(left, rest, steps * 16);
            clear_rows<WIDTH / 64>(right, rest, steps * 16);
            show_to_products();
            meet_warpgroup(1 + group);
            u64 lefts = described_boxes<left_across>(left), rights = described_boxes<right_across>(right);
            for (int i = 0; i < steps; i++) {
                begin_products();
                add_product<left_across, right_across>(sums, lefts + i * next_summands<left_across>(),
                                                       rights + i * next_summands<right_across>());
                commit_products();
                wait_products<0>();
                settle(sums);
            }
            if (lane == 0) arrive(barriers.empty_at(ring.stage));
            ring.advance();
        }
        if (place.rows <= 0) continue;
        if (p.out.is_bf16)
            store_sums<bf16, ORDER, WIDTH>(p, out, sums, place, own_stored, turn);
        else
            store_sums<float, ORDER, WIDTH>(p, out, sums, place, own_stored, turn);
    }
    if (lane == 0) wait_stores<0>();
}

// Experts with the most rows first, so that no block ends with a long tile. Every thread of the block calls it.
__device__ __forceinline__ void sort_experts(const Operands &p, u16 *order, u32 *rows) {
    for (int i = threadIdx.x; i < p.experts; i += BLOCK_THREADS) rows[i] = p.offsets[i + 1] - p.offsets[i];
    __syncthreads();
    for (int i = threadIdx.x; i < p.experts; i += BLOCK_THREADS) {
        int place = 0;
        for (int other = 0; other < p.experts; other++)
            place += rows[other] > rows[i] || (rows[other] == rows[i] && other < i);
        order[place] = (u16)i;
    }
}

extern __shared__ u16 memory[];

template <int ORDER, int WIDTH>
__device__ __forceinline__ void product_hopper(const Operands &p, const TensorMap &a, const TensorMap &b,
                                               const TensorMap &out) {
    __shared__ u64 barrier_words[2 * STAGES];
    __shared__ u32 sorted_rows[ORDER == TN ? MOST_SORTED : 1];
    __shared__ u16 sorted[ORDER == TN ? MOST_SORTED : 1];
    u32 stages = (shared_address(memory) + 1023) / 1024 * 1024;
    u32 stored = stages + STAGES * (HEIGHT + WIDTH) * ROW_BYTES;
    Barriers barriers = {shared_address(barrier_words), shared_address(barrier_words + STAGES)};
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; stage++) {
            init_barrier(barriers.full_at(stage), 1);
            // The warps that multiply.
            init_barrier(barriers.empty_at(stage), 8);
        }
        show_barriers();
    }
    // Tiles of the other orders are equally long.
    const u16 *order = ORDER == TN && p.experts <= MOST_SORTED ? sorted : nullptr;
    if (order) sort_experts(p, sorted, sorted_rows);
    __syncthreads();
    if (threadIdx.x < GROUP_THREADS) {
        give_registers<40>();
        if (threadIdx.x < 32) fetch_tiles<ORDER, WIDTH>(p, a, b, order, stages, barriers);
    } else {
        take_registers<232>();
        multiply_tiles<ORDER, WIDTH>(p, out, order, stages, stored, barriers);
    }
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define PRODUCT(ORDER, NAME, WIDTH) \
    extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1) \
        grouped_##NAME##_##WIDTH(const __grid_constant__ Operands p, const __grid_constant__ TensorMap a, \
                                 const __grid_constant__ TensorMap b, const __grid_constant__ TensorMap out) { \
        product_hopper<ORDER, WIDTH>(p, a, b, out); \
    }
PRODUCT(NT, nt, 256)
PRODUCT(NN, nn, 256)
PRODUCT(TN, tn, 256)
PRODUCT(NT, nt, 128)
PRODUCT(NN, nn, 128)
PRODUCT(TN, tn, 128)
#endif
