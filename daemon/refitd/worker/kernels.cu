// Device code of a refit: copies, comparisons, gathers and digests over tables of pointers, each one launch.
// Compiled at run time without headers, so it names its own integer types.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct Chunk {
    u64 source;
    u64 target;
    u64 vectors;  // of 16 bytes
};

struct Run {
    u64 address;  // of the first element
    u64 other;    // where the same bytes must be found too, or 0
    u64 first;    // row-major index of the first element in its checkpoint tensor
    u64 salt;     // of the tensor's name
    u32 elements;
    u32 group;
};

static const int LANES = 4096;
// Of shared memory for what is on its way, in each block of threads.
#define FETCHED_BYTES (32 << 10)
static const u64 GOLDEN = 0x9E3779B97F4A7C15ull;

// Weights are read once: nothing of them is worth a place in the caches.
__device__ __forceinline__ uint4 load_once(const uint4* from) {
    uint4 value;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(from));
    return value;
}

// Copies 16 bytes into shared memory in the background, where the device can.
__device__ __forceinline__ void fetch_once(uint4* to, const uint4* from) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from)
                 : "memory");
#else
    *to = load_once(from);
#endif
}

__device__ __forceinline__ void end_group() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Until no more than the last GROUPS groups of fetches are under way.
template <int GROUPS>
__device__ __forceinline__ void await_groups() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
#endif
}

// Decides for all copies behind it whether they run: they do unless the host has cancelled them. `ran` tells the host.
extern "C" __global__ void admit(const volatile u32* cancelled, u32* may_run, volatile u32* ran) {
    const u32 yes = *cancelled == 0;
    *may_run = yes;
    *ran = yes;
    __threadfence_system();
}

// One block a chunk; every thread has COPY_UNROLL loads under way before its first store. Plain loads and stores: with
// hints to leave the caches alone they are slower.
#define COPY_UNROLL 2
extern "C" __global__ __launch_bounds__(1024) void copy_chunks(const Chunk* chunks, const u32* may_run) {
    const Chunk chunk = chunks[blockIdx.x];
    const uint4* source = (const uint4*)chunk.source;
    uint4* target = (uint4*)chunk.target;
    // Not a branch of its own: that would wait for one word before it asked for the other.
    const u32 count = *may_run ? (u32)chunk.vectors : 0;
    u32 at = threadIdx.x;
    for (; at + (COPY_UNROLL - 1) * blockDim.x < count; at += COPY_UNROLL * blockDim.x) {
        uint4 held[COPY_UNROLL];
#pragma unroll
        for (int i = 0; i < COPY_UNROLL; i++) held[i] = source[at + i * blockDim.x];
#pragma unroll
        for (int i = 0; i < COPY_UNROLL; i++) target[at + i * blockDim.x] = held[i];
    }
    for (; at < count; at += blockDim.x) target[at] = source[at];
}

// The bits of elements of `widths` bytes anywhere in memory, as signed integers.
extern "C" __global__ void gather_bits(const u64* addresses, const unsigned char* widths, i64* bits, u32 count) {
    const u32 at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= count) return;
    const u64 address = addresses[at];
    switch (widths[at]) {
        case 1: bits[at] = *(const signed char*)address; break;
        case 2: bits[at] = *(const short*)address; break;
        case 4: bits[at] = *(const int*)address; break;
        default: bits[at] = *(const i64*)address;
    }
}

__device__ __forceinline__ u64 block_weight(u64 block, u64 salt) {
    u64 value = block + salt + GOLDEN;
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBull;
    return (value ^ (value >> 31)) | 1;
}

template <typename Bits>
union Vector {
    uint4 raw;
    Bits bits[16 / sizeof(Bits)];
};

// 256 threads take a block of LANES elements at a time, 16 elements each, so that a thread always meets the same lanes
// and keeps their weights in registers: the lower half as a signed number, and what then remains above it, so that a
// narrow element costs one wide and one narrow multiply-add.
template <typename Bits>
struct Lanes {
    static const int PER_VECTOR = 16 / sizeof(Bits);
    static const int VECTORS = 16 / PER_VECTOR;
    int lower[16];
    u32 upper[16];

    __device__ __forceinline__ explicit Lanes(const u64* lane_weights) {
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
#pragma unroll
            for (int i = 0; i < PER_VECTOR; i++) {
                const u64 weight = lane_weights[(v * 256 + threadIdx.x) * PER_VECTOR + i];
                lower[v * PER_VECTOR + i] = (int)(u32)weight;
                upper[v * PER_VECTOR + i] = (u32)(weight >> 32) + ((u32)weight >> 31);
            }
    }
};

// The weighted sum of 16 elements, modulo 2^64.
template <typename Bits>
__device__ __forceinline__ u64 weigh(const Vector<Bits>* held, const Lanes<Bits>& lanes) {
    i64 wide = 0;
    u32 above = 0;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const int bits = held[i / Lanes<Bits>::PER_VECTOR].bits[i % Lanes<Bits>::PER_VECTOR];
        wide += (i64)bits * lanes.lower[i];
        above += (u32)bits * lanes.upper[i];
    }
    return (u64)wide + ((u64)above << 32);
}

template <>
__device__ __forceinline__ u64 weigh<i64>(const Vector<i64>* held, const Lanes<i64>& lanes) {
    u64 sum = 0;
#pragma unroll
    for (int i = 0; i < 16; i++)
        sum += (u64)held[i / 2].bits[i % 2] * (((u64)lanes.upper[i] << 32) + (u64)(i64)lanes.lower[i]);
    return sum;
}

// A block at a time on its way from memory into shared memory, STAGES of them: so many bytes could not be under way in
// registers. A thread reads only what it fetched itself, so nobody has to wait for the others.
template <typename Bits>
struct Fetches {
    static const int VECTORS = Lanes<Bits>::VECTORS;
    static const int STAGES = FETCHED_BYTES / (VECTORS * 256 * 16);
    static const u32 BLOCK_VECTORS = LANES / Lanes<Bits>::PER_VECTOR;
    const uint4* data;
    uint4 (*ring)[VECTORS][256];

    __device__ __forceinline__ void begin(u32 block, u32 blocks) const {
        if (block < blocks) {
#pragma unroll
            for (int v = 0; v < VECTORS; v++)
                fetch_once(&ring[block % STAGES][v][threadIdx.x], data + block * BLOCK_VECTORS + v * 256);
        }
        end_group();
    }

    // Once the fetches that were begun STAGES - 1 blocks ago have arrived.
    __device__ __forceinline__ void take(u32 block, Vector<Bits>* held) const {
        await_groups<STAGES - 1>();
#pragma unroll
        for (int v = 0; v < VECTORS; v++) held[v].raw = ring[block % STAGES][v][threadIdx.x];
    }
};

template <typename Bits>
__device__ __forceinline__ u64 sum_aligned(const Run& run, u32 blocks, const Lanes<Bits>& lanes, bool& differs) {
    typedef Fetches<Bits> F;
    __shared__ uint4 ring[F::STAGES][F::VECTORS][256];
    const F fetches = {(const uint4*)run.address + threadIdx.x, ring};
    const uint4* other = (const uint4*)run.other + threadIdx.x;
    const u32 lane_of_warp = threadIdx.x % 32;
    u64 sum = 0, weight = 0;
    for (u32 block = 0; block < F::STAGES - 1; block++) fetches.begin(block, blocks);
    for (u32 block = 0; block < blocks; block++) {
        fetches.begin(block + F::STAGES - 1, blocks);
        // Each thread of a warp works out the weight of one of the next 32 blocks.
        if (block % 32 == 0) weight = block_weight(run.first / LANES + block + lane_of_warp, run.salt);
        Vector<Bits> held[F::VECTORS];
        fetches.take(block, held);
        if (run.other) {
#pragma unroll
            for (int v = 0; v < F::VECTORS; v++) {
                const uint4 same = load_once(other + block * F::BLOCK_VECTORS + v * 256);
                differs |= same.x != held[v].raw.x || same.y != held[v].raw.y || same.z != held[v].raw.z ||
                           same.w != held[v].raw.w;
            }
        }
        sum += weigh<Bits>(held, lanes) * __shfl_sync(0xffffffffu, weight, block % 32);
    }
    return sum;
}

template <typename Bits>
__device__ __forceinline__ u64 sum_plain(const Run& run, u32 begin, const u64* lane_weights, bool& differs) {
    const Bits* data = (const Bits*)run.address;
    const Bits* other = (const Bits*)run.other;
    u64 sum = 0;
    for (u32 at = begin + threadIdx.x; at < run.elements; at += 256) {
        const u64 index = run.first + at;
        const Bits bits = data[at];
        if (other && other[at] != bits) differs = true;
        sum += (u64)(i64)bits * lane_weights[index % LANES] * block_weight(index / LANES, run.salt);
    }
    return sum;
}

__device__ __forceinline__ u64 warp_sum(u64 value) {
#pragma unroll
    for (int step = 16; step; step >>= 1) value += __shfl_xor_sync(0xffffffffu, value, step);
    return value;
}

// Adds the digest of every run to the sum of its group; `different[run]` becomes 1 where `other` holds other bytes.
template <typename Bits>
__device__ __forceinline__ void digest(const Run* runs, u32 count, const u64* lane_weights, u64* sums,
                                       unsigned char* different) {
    const Lanes<Bits> lanes(lane_weights);
    for (u32 number = blockIdx.x; number < count; number += gridDim.x) {
        const Run run = runs[number];
        const bool aligned = run.first % LANES == 0 && (run.address | run.other) % 16 == 0;
        const u32 blocks = aligned ? run.elements / LANES : 0;
        bool differs = false;
        u64 sum = sum_aligned<Bits>(run, blocks, lanes, differs);
        sum += sum_plain<Bits>(run, blocks * LANES, lane_weights, differs);
        sum = warp_sum(sum);
        if (threadIdx.x % 32 == 0) atomicAdd(sums + run.group, sum);
        if (differs) different[number] = 1;
    }
}
extern "C" __global__ __launch_bounds__(256, 3) void digest_1(const Run* r, u32 n, const u64* w, u64* s, unsigned char* d) {
    digest<signed char>(r, n, w, s, d);
}
extern "C" __global__ __launch_bounds__(256, 3) void digest_2(const Run* r, u32 n, const u64* w, u64* s, unsigned char* d) {
    digest<short>(r, n, w, s, d);
}
extern "C" __global__ __launch_bounds__(256, 3) void digest_4(const Run* r, u32 n, const u64* w, u64* s, unsigned char* d) {
    digest<int>(r, n, w, s, d);
}
extern "C" __global__ __launch_bounds__(256) void digest_8(const Run* r, u32 n, const u64* w, u64* s, unsigned char* d) {
    digest<i64>(r, n, w, s, d);
}

// Older devices have no such instruction, and are not asked for this kernel.
#if __CUDA_ARCH__ >= 800

// Whole blocks of elements of 2 bytes, on the tensor cores: by the multiply-adds of `digest` such elements are weighed
// more slowly than memory delivers them. The sum is taken apart into a product of two matrices of bytes, A * B:
//
// - An element is low + 256 * high, and a weight is the sum over n of its byte n * 256^n. So B has a row for each byte
//   of the elements and eight columns: column n holds byte n of the weight where the row meets a low byte, and byte n
//   of 256 * weight where it meets a high one. What 256 * weight loses at the top is nothing modulo 2^64.
// - All blocks have the same lane weights. So the rows of A are blocks: a warp always meets the same 512 lanes and
//   keeps B in registers, and each row of the product is multiplied by the weight of its block once, in 64 bits.
// - Of a signed element the high byte alone is signed, which the instruction cannot be told. The bits ^ 0x8000 are the
//   element + 32768 as an unsigned number; what that adds to a row, 32768 * the sum of its lane weights, is constant.
// - A number of the product adds up 1024 products of two bytes, which stays below 2^26.
//
// The instruction takes 16 rows and 32 columns of A. A warp's lane g * 4 + t holds of them rows g and g + 8, columns
// 4 * t to 4 * t + 3 and 16 more than these; of B the rows with those numbers, column g; and of the product rows g and
// g + 8, columns 2 * t and 2 * t + 1. Which byte is which column of A is free as long as B has the same order, so every
// lane takes 16 bytes as they lie and spends them on two instructions.
struct ByteWeights {
    static const int WARP_LANES = LANES / 8;   // of each of the 8 warps
    static const int LOADS = WARP_LANES / 32;  // of 16 bytes for each of 4 lanes of a warp, to read one row
    u32 bytes[LOADS][2][2];
    u64 excess;  // of a row, in one of the lanes that hold it

    __device__ __forceinline__ explicit ByteWeights(const u64* lane_weights) {
        const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        const u64* mine = lane_weights + threadIdx.x / 32 * WARP_LANES;
        u64 sum = 0;
        for (u32 i = lane; i < WARP_LANES; i += 32) sum += mine[i];
        sum = warp_sum(sum);
        excess = t == 0 ? sum << 15 : 0;
#pragma unroll
        for (int load = 0; load < LOADS; load++)
#pragma unroll
            for (int pair = 0; pair < 4; pair++)
                bytes[load][pair / 2][pair % 2] = column(mine + load * 32 + t * 8 + pair * 2, 8 * g);
    }

    // What two elements, low byte first, meet in the column whose byte begins at bit `at` of a weight.
    static __device__ __forceinline__ u32 column(const u64* weights, u32 at) {
        const u64 one = weights[0], two = weights[1];
        return (u32)(one >> at & 255) | (u32)((one << 8) >> at & 255) << 8 | (u32)(two >> at & 255) << 16 |
               (u32)((two << 8) >> at & 255) << 24;
    }
};

// Adds A * B to `product`; A as four elements of row g, `upper`, and four of row g + 8, `lower`.
__device__ __forceinline__ void multiply_bytes(int* product, uint2 upper, uint2 lower, const u32* weights) {
    const u32 signs = 0x80008000u;
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(product[0]), "+r"(product[1]), "+r"(product[2]), "+r"(product[3])
        : "r"(upper.x ^ signs), "r"(lower.x ^ signs), "r"(upper.y ^ signs), "r"(lower.y ^ signs), "r"(weights[0]),
          "r"(weights[1]));
}

// This warp's lanes of 16 blocks from `begin` on. Rows past the last of `blocks` read block `begin` and count nothing.
__device__ __forceinline__ u64 sum_rows(const Run& run, u32 begin, u32 blocks, const ByteWeights& weights) {
    const int BATCH = 4;  // loads under way for each row
    const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint4* rows[2];
    u64 row_weights[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const u32 block = begin + half * 8 + g;
        const bool counts = block < blocks;
        rows[half] = (const uint4*)run.address + (counts ? block : begin) * (LANES / 8) +
                     threadIdx.x / 32 * (ByteWeights::WARP_LANES / 8) + t;
        row_weights[half] = counts ? block_weight(run.first / LANES + block, run.salt) : 0;
    }
    int product[4] = {0, 0, 0, 0};
#pragma unroll
    for (int load = 0; load < ByteWeights::LOADS; load += BATCH) {
        uint4 upper[BATCH], lower[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            upper[i] = load_once(rows[0] + (load + i) * 4);
            lower[i] = load_once(rows[1] + (load + i) * 4);
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const u32(*columns)[2] = weights.bytes[load + i];
            multiply_bytes(product, {upper[i].x, upper[i].y}, {lower[i].x, lower[i].y}, columns[0]);
            multiply_bytes(product, {upper[i].z, upper[i].w}, {lower[i].z, lower[i].w}, columns[1]);
        }
    }
    u64 sum = 0;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const u64 row = ((u64)(u32)product[half * 2] << 16 * t) + ((u64)(u32)product[half * 2 + 1] << 16 * t + 8);
        sum += (row - weights.excess) * row_weights[half];
    }
    return sum;
}

// As digest_2, for runs of whole blocks at multiples of 16 bytes that are not compared with anything.
extern "C" __global__ __launch_bounds__(256, 1) void digest_2_blocks(const Run* runs, u32 count,
                                                                     const u64* lane_weights, u64* sums,
                                                                     unsigned char*) {
    const ByteWeights weights(lane_weights);
    for (u32 number = blockIdx.x; number < count; number += gridDim.x) {
        const Run run = runs[number];
        const u32 blocks = run.elements / LANES;
        u64 sum = 0;
        for (u32 begin = 0; begin < blocks; begin += 16) sum += sum_rows(run, begin, blocks, weights);
        sum = warp_sum(sum);
        if (threadIdx.x % 32 == 0) atomicAdd(sums + run.group, sum);
    }
}

#endif
