// Sums and copies of memory of several devices on one GPU, by address.

// As in peer.rs and cuda/peer.rs.
#define MOST_PEERS 16

struct Sum {
    u64 sources[MOST_PEERS];
    u64 destinations[MOST_PEERS];
    i64 len;
    int source_count;
    int destination_count;
};

// A thread reads its elements of all sources before it writes them anywhere, so a destination may be a source. Sources are
// added in their order.
#define PEER_SUM(T, NAME, N) \
    extern "C" __global__ void __launch_bounds__(256) peer_sum_##NAME##_##N(const __grid_constant__ Sum sum) { \
        each_vector<N>(1, sum.len, [&](i64, i64 col, int count) { \
            float total[N]; \
            load<N>(reinterpret_cast<const T *>(sum.sources[0]) + col, count, total); \
            _Pragma("unroll 4") for (int i = 1; i < sum.source_count; i++) { \
                float summand[N]; \
                load<N>(reinterpret_cast<const T *>(sum.sources[i]) + col, count, summand); \
                for (int j = 0; j < N; j++) total[j] += summand[j]; \
            } \
            for (int i = 0; i < sum.destination_count; i++) \
                store<N>(reinterpret_cast<T *>(sum.destinations[i]) + col, count, total); \
        }); \
    }
FOR_TYPES(PEER_SUM)

// Rows of so many words each, which begin so many bytes one after another. Bits are moved as they are.
#define PEER_COPY(WORD, BYTES) \
    extern "C" __global__ void __launch_bounds__(256) peer_copy_##BYTES( \
        i64 rows, i64 words, const char *from, i64 from_step, char *to, i64 to_step) { \
        each_vector<1>(rows, words, [&](i64 row, i64 word, int) { \
            reinterpret_cast<WORD *>(to + row * to_step)[word] = \
                reinterpret_cast<const WORD *>(from + row * from_step)[word]; \
        }); \
    }
PEER_COPY(uint4, 16)
PEER_COPY(u32, 4)
PEER_COPY(u16, 2)
