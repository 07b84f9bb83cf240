// The engine's arithmetic on a GPU: the same bits as `engine/reduce.rs` makes on the CPU.
//
// NVRTC, or hipRTC, compiles it at run time for the device at hand, one module for each type of elements: `MODULE` says which. The host's
// compiler takes it too, as a whole; tests compare what that computes with the CPU engine. Neither may contract a product and
// a sum, flush subnormal numbers or multiply by reciprocals: see the options in `kernels.rs`.
//
// Each kernel combines blocks of equal length element by element, in their order: in a wide type, rounded once at the end.
// A block may be `into` itself. Nothing needs to be aligned; memory that is aligned alike is taken 16 bytes at a time. Threads
// share nothing and wait for nothing, so any grid is right.

#if defined(__CUDACC__) || defined(__HIPCC_RTC__)
#define SOFTCUDA_TWIN(name)
#else
#include "softcuda_kernel.h"
#endif
#if !defined(__CUDACC__) || defined(__HIPCC_RTC__)
#define __grid_constant__
#endif

typedef signed char i8;
typedef short i16;
typedef int i32;
typedef long long i64;
typedef __int128 i128;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned __int128 u128;
typedef float f32;
typedef double f64;

#define INLINE __device__ __forceinline__

// What is combined. By value: a launch takes it along.
struct Blocks {
  const void* at[128];
};

// The same bits as another type.

INLINE f32 f32_of(u32 bits) {
  union {
    u32 bits;
    f32 number;
  } both = {bits};
  return both.number;
}

INLINE u32 bits_of(f32 number) {
  union {
    f32 number;
    u32 bits;
  } both = {number};
  return both.bits;
}

INLINE f64 f64_of(u64 bits) {
  union {
    u64 bits;
    f64 number;
  } both = {bits};
  return both.number;
}

INLINE u64 bits_of(f64 number) {
  union {
    f64 number;
    u64 bits;
  } both = {number};
  return both.bits;
}

// Half precision. As `widen_f16` and `narrow_f16` of `engine/reduce.rs`, after Giesen, "half-float conversion",
// https://gist.github.com/rygorous/2144712.

INLINE f32 widen_f16(u16 half) {
  const u32 exponent_bits = 0x7c00u << 13, bias = (127u - 15) << 23, least_normal = bias + (1u << 23);
  const u32 magnitude = (half & 0x7fffu) << 13;
  const u32 exponent = magnitude & exponent_bits, normal = magnitude + bias;
  // Where the exponent is zero, the sum has an implicit leading one too many.
  const u32 subnormal = bits_of(f32_of(magnitude + least_normal) - f32_of(least_normal));
  const u32 finite = exponent == 0 ? subnormal : normal;
  return f32_of((half & 0x8000u) << 16 | (exponent == exponent_bits ? normal + bias : finite));
}

// To nearest, ties to even.
INLINE u16 narrow_f16(f32 number) {
  const u32 infinite = 0x7f800000u, too_large = (127u + 16) << 23, least_normal = (127u - 14) << 23;
  // Its last bit weighs as much as that of a subnormal, so adding it rounds there.
  const u32 align = (127u - 15 + 23 - 10 + 1) << 23;
  const u32 bits = bits_of(number), magnitude = bits & 0x7fffffffu, odd = (magnitude >> 13) & 1;
  const u32 normal = (magnitude - ((127u - 15) << 23) + 0x0fffu + odd) >> 13;
  const u32 subnormal = bits_of(f32_of(magnitude) + f32_of(align)) - align;
  const u32 finite = magnitude < least_normal ? subnormal : normal;
  const u32 rounded = magnitude >= too_large ? 0x7c00u : finite;
  return static_cast<u16>(magnitude > infinite ? 0x7e00u : ((bits >> 16) & 0x8000u) | rounded);
}

INLINE f32 widen_bf16(u16 half) { return f32_of(static_cast<u32>(half) << 16); }

// To nearest, ties to even.
INLINE u16 narrow_bf16(f32 number) {
  const u32 bits = bits_of(number);
  return static_cast<u16>(number != number ? 0x7fc0u : (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

// The operations. Integers wrap around, by way of unsigned ones.

#define INTEGER_OPERATIONS(type, modular)                                                                          \
  INLINE type sum(type a, type b) { return static_cast<type>(static_cast<modular>(a) + static_cast<modular>(b)); } \
  INLINE type product(type a, type b) {                                                                            \
    return static_cast<type>(static_cast<modular>(a) * static_cast<modular>(b));                                   \
  }                                                                                                                \
  INLINE type least(type a, type b) { return b < a ? b : a; }                                                      \
  INLINE type greatest(type a, type b) { return a < b ? b : a; }

// Each comparison gives its right side where the two are equal or one is a NaN. So the two agree but for zeros and NaN, where
// their bits together are -0 or a NaN.
#define FLOAT_OPERATIONS(type, of)                                                                  \
  INLINE type sum(type a, type b) { return a + b; }                                                 \
  INLINE type product(type a, type b) { return a * b; }                                             \
  INLINE type least(type a, type b) { return of(bits_of(a < b ? a : b) | bits_of(b < a ? b : a)); } \
  INLINE type greatest(type a, type b) { return -least(-a, -b); }

INTEGER_OPERATIONS(u8, u32)
INTEGER_OPERATIONS(i8, u32)
INTEGER_OPERATIONS(u16, u32)
INTEGER_OPERATIONS(i16, u32)
INTEGER_OPERATIONS(u32, u32)
INTEGER_OPERATIONS(i32, u32)
INTEGER_OPERATIONS(u64, u64)
INTEGER_OPERATIONS(i64, u64)
INTEGER_OPERATIONS(i128, u128)
FLOAT_OPERATIONS(f32, f32_of)
FLOAT_OPERATIONS(f64, f64_of)

#define OPERATION(name, expression)         \
  struct Operation_##name {                 \
    template <class Wide>                   \
    static INLINE Wide of(Wide a, Wide b) { \
      return expression;                    \
    }                                       \
  };
OPERATION(sum, sum(a, b))
OPERATION(product, product(a, b))
OPERATION(min, least(a, b))
OPERATION(max, greatest(a, b))
OPERATION(band, static_cast<Wide>(a & b))
OPERATION(bor, static_cast<Wide>(a | b))
OPERATION(bxor, static_cast<Wide>(a ^ b))

// Toward zero, to the nearest number of the type; 0 for a NaN.
template <class Integer>
INLINE Integer saturated(f64 number) {
  const bool is_signed = static_cast<Integer>(-1) < 0;
  const u32 digits = 8 * sizeof(Integer) - (is_signed ? 1 : 0);
  const u64 greatest = ~0ull >> (64 - digits);
  // Beyond it; exact.
  const f64 limit = 2.0 * static_cast<f64>(1ull << (digits - 1));
  if (number != number) return 0;
  if (number >= limit) return static_cast<Integer>(greatest);
  if (number <= (is_signed ? -limit : 0.0)) return static_cast<Integer>(is_signed ? greatest + 1 : 0);
  return static_cast<Integer>(number);
}

// Exact where the factor is a whole number of the type's range: the lowest bits of the product are then those that 64 bits
// give.
template <class Integer>
INLINE Integer scaled(Integer number, f64 factor) {
  const f64 limit = 9223372036854775808.0;
  if (factor >= -limit && factor <= limit) {
    const u64 whole = factor == limit ? 1ull << 63 : static_cast<u64>(static_cast<i64>(factor));
    if (factor == limit || static_cast<f64>(static_cast<i64>(factor)) == factor) {
      return static_cast<Integer>(static_cast<u64>(number) * whole);
    }
  }
  return saturated<Integer>(static_cast<f64>(number) * factor);
}

INLINE f32 scaled(f32 number, f64 factor) { return number * static_cast<f32>(factor); }
INLINE f64 scaled(f64 number, f64 factor) { return number * factor; }

// The types of elements and of sums: how one lies in memory, the type it is computed in, the type of sums of it. A NaN that is
// stored is the one that PyTorch's constants are, whichever NaN came in.

#define ELEMENT(name, memory, wide, sum, widened, narrowed)                           \
  struct Element_##name {                                                             \
    typedef memory Memory;                                                            \
    typedef wide Wide;                                                                \
    typedef Element_##sum Sum;                                                        \
    static INLINE Wide load(Memory bits) { return widened; }                          \
    static INLINE Memory store(Wide number) { return static_cast<Memory>(narrowed); } \
  };
#define INTEGER(name, memory, wide, sum) ELEMENT(name, memory, wide, sum, static_cast<wide>(bits), number)

// Any byte but zero is true.
ELEMENT(bool, u8, u8, bool, bits != 0, number)
INTEGER(int128, u128, i128, int128)
INTEGER(uint64, u64, u64, int128)
INTEGER(int64, u64, i64, int128)
INTEGER(uint32, u32, u32, int64)
INTEGER(int32, u32, i32, int64)
INTEGER(uint16, u16, u16, int64)
INTEGER(int16, u16, i16, int64)
INTEGER(uint8, u8, u8, int32)
INTEGER(int8, u8, i8, int32)
ELEMENT(float64, u64, f64, float64, f64_of(bits), number != number ? 0x7ff8000000000000ull : bits_of(number))
ELEMENT(float32, u32, f32, float32, f32_of(bits), number != number ? 0x7fc00000u : bits_of(number))
ELEMENT(float16, u16, f32, float32, widen_f16(bits), narrow_f16(number))
ELEMENT(bfloat16, u16, f32, float32, widen_bf16(bits), narrow_bf16(number))

// What a kernel does with one element of each block.

template <class Element, class Operation>
struct Fold {
  typedef typename Element::Memory From;
  typedef typename Element::Memory Into;
  typedef typename Element::Wide Wide;
  INLINE Wide load(From bits) const { return Element::load(bits); }
  INLINE Wide combine(Wide a, Wide b) const { return Operation::of(a, b); }
  INLINE Into store(Wide number) const { return Element::store(number); }
};

template <class Element>
struct Widen {
  typedef typename Element::Memory From;
  typedef typename Element::Sum::Memory Into;
  typedef typename Element::Sum::Wide Wide;
  INLINE Wide load(From bits) const { return static_cast<Wide>(Element::load(bits)); }
  INLINE Wide combine(Wide a, Wide b) const { return sum(a, b); }
  INLINE Into store(Wide number) const { return Element::Sum::store(number); }
};

// Of blocks of `Block`s: elements or their sums.
template <class Element, class Block>
struct Average {
  typedef typename Block::Memory From;
  typedef typename Element::Memory Into;
  typedef typename Element::Sum::Wide Wide;
  u32 world;
  INLINE Wide load(From bits) const { return static_cast<Wide>(Block::load(bits)); }
  INLINE Wide combine(Wide a, Wide b) const { return sum(a, b); }
  INLINE Into store(Wide number) const {
    return Element::store(static_cast<typename Element::Wide>(number / static_cast<Wide>(world)));
  }
};

template <class Element>
struct Scale {
  typedef typename Element::Memory From;
  typedef typename Element::Memory Into;
  typedef typename Element::Wide Wide;
  f64 factor;
  INLINE Wide load(From bits) const { return scaled(Element::load(bits), factor); }
  INLINE Wide combine(Wide, Wide b) const { return b; }
  INLINE Into store(Wide number) const { return Element::store(number); }
};

// Memory.

INLINE u64 address_of(const void* pointer) { return reinterpret_cast<u64>(pointer); }

template <class Value>
INLINE Value read(const void* pointer) {
  if (address_of(pointer) % sizeof(Value) == 0) return *static_cast<const Value*>(pointer);
  union {
    Value value;
    u8 bytes[sizeof(Value)];
  } both;
  for (u32 byte = 0; byte < sizeof(Value); ++byte) both.bytes[byte] = static_cast<const u8*>(pointer)[byte];
  return both.value;
}

template <class Value>
INLINE void write(void* pointer, Value value) {
  if (address_of(pointer) % sizeof(Value) == 0) {
    *static_cast<Value*>(pointer) = value;
    return;
  }
  union {
    Value value;
    u8 bytes[sizeof(Value)];
  } both = {value};
  for (u32 byte = 0; byte < sizeof(Value); ++byte) static_cast<u8*>(pointer)[byte] = both.bytes[byte];
}

// Read and written by one instruction.
struct alignas(16) Chunk {
  u32 words[4];
};

template <class Value, u32 COUNT>
union Packet {
  Value values[COUNT];
  Chunk chunks[COUNT * sizeof(Value) / 16];

  INLINE void read(const Value* from) {
#pragma unroll
    for (u32 index = 0; index < sizeof(chunks) / 16; ++index) chunks[index] = reinterpret_cast<const Chunk*>(from)[index];
  }
  INLINE void write(Value* into) const {
#pragma unroll
    for (u32 index = 0; index < sizeof(chunks) / 16; ++index) reinterpret_cast<Chunk*>(into)[index] = chunks[index];
  }
};

template <class Work>
INLINE void take_one(void* into, const Blocks& blocks, u32 many, u64 index, const Work& work) {
  typedef typename Work::From From;
  typedef typename Work::Into Into;
  typename Work::Wide wide = work.load(read<From>(static_cast<const From*>(blocks.at[0]) + index));
  for (u32 block = 1; block < many; ++block) {
    wide = work.combine(wide, work.load(read<From>(static_cast<const From*>(blocks.at[block]) + index)));
  }
  write<Into>(static_cast<Into*>(into) + index, work.store(wide));
}

template <u32 COUNT, class Work>
INLINE void take_packet(void* into, const Blocks& blocks, u32 many, u64 index, const Work& work) {
  typedef typename Work::From From;
  typedef typename Work::Into Into;
  typename Work::Wide wide[COUNT];
  Packet<From, COUNT> from;
  from.read(static_cast<const From*>(blocks.at[0]) + index);
#pragma unroll
  for (u32 part = 0; part < COUNT; ++part) wide[part] = work.load(from.values[part]);
  for (u32 block = 1; block < many; ++block) {
    from.read(static_cast<const From*>(blocks.at[block]) + index);
#pragma unroll
    for (u32 part = 0; part < COUNT; ++part) wide[part] = work.combine(wide[part], work.load(from.values[part]));
  }
  Packet<Into, COUNT> result;
#pragma unroll
  for (u32 part = 0; part < COUNT; ++part) result.values[part] = work.store(wide[part]);
  result.write(static_cast<Into*>(into) + index);
}

// Does the work with `count` elements of each block: whole chunks if there is an element from which on everything is aligned.
template <class Work>
INLINE void take_all(void* into, const Blocks& blocks, u32 many, u64 count, const Work& work) {
  const u64 from_size = sizeof(typename Work::From), into_size = sizeof(typename Work::Into);
  const u32 packet = 16 / (from_size < into_size ? from_size : into_size);
  const u64 thread = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x;
  const u64 threads = static_cast<u64>(gridDim.x) * blockDim.x;
  if (many == 0) return;

  u64 head = (16 - address_of(into) % 16) % 16 / into_size;
  u64 rest = address_of(into) + head * into_size;
  for (u32 block = 0; block < many; ++block) rest |= address_of(blocks.at[block]) + head * from_size;
  if (rest % 16 != 0 || head > count) head = count;

  const u64 packets = (count - head) / packet, tail = head + packets * packet;
  for (u64 index = thread; index < head; index += threads) take_one(into, blocks, many, index, work);
  for (u64 index = thread; index < packets; index += threads) {
    take_packet<packet>(into, blocks, many, head + index * packet, work);
  }
  for (u64 index = tail + thread; index < count; index += threads) take_one(into, blocks, many, index, work);
}

// A factor in the device's memory, of the type with this number in `DType`.
INLINE f64 read_factor(const void* at, u32 dtype) {
  switch (dtype) {
    case 1: return read<u8>(at);
    case 2: return static_cast<i8>(read<u8>(at));
    case 3: return read<u16>(at);
    case 4: return static_cast<i16>(read<u16>(at));
    case 5: return read<u32>(at);
    case 6: return static_cast<i32>(read<u32>(at));
    case 7: return static_cast<f64>(read<u64>(at));
    case 8: return static_cast<f64>(static_cast<i64>(read<u64>(at)));
    case 9: return widen_f16(read<u16>(at));
    case 10: return widen_bf16(read<u16>(at));
    case 11: return f32_of(read<u32>(at));
    default: return f64_of(read<u64>(at));
  }
}

// The kernels. Of complex numbers they take the parts.

#define KERNEL(name, ...)                       \
  extern "C" __global__ void name(__VA_ARGS__); \
  SOFTCUDA_TWIN(name)                           \
  extern "C" __global__ void name(__VA_ARGS__)

// into = block_0 (+) block_1 (+) ...
#define FOLD(operation, name)                                                                                 \
  KERNEL(fold_##operation##_##name, void* into, const __grid_constant__ Blocks blocks, u32 many, u64 count) { \
    take_all(into, blocks, many, count, Fold<Element_##name, Operation_##operation>());                       \
  }

// What PREMUL_SUM and AVG take besides: products with a factor, here or at `factor_at`; sums of elements, and of such sums;
// averages, which are sums divided by `world`.
#define SUMS(name)                                                                                                    \
  KERNEL(scale_##name, void* into, const void* from, u64 count, f64 factor, const void* factor_at, u32 factor_type) { \
    const Blocks blocks = {{from}};                                                                                   \
    const Scale<Element_##name> work = {factor_at ? read_factor(factor_at, factor_type) : factor};                    \
    take_all(into, blocks, 1, count, work);                                                                           \
  }                                                                                                                   \
  KERNEL(widen_##name, void* into, const void* from, u64 count) {                                                     \
    const Blocks blocks = {{from}};                                                                                   \
    take_all(into, blocks, 1, count, Widen<Element_##name>());                                                        \
  }                                                                                                                   \
  KERNEL(fold_sums_##name, void* into, const __grid_constant__ Blocks blocks, u32 many, u64 count) {                  \
    take_all(into, blocks, many, count, Fold<Element_##name::Sum, Operation_sum>());                                  \
  }                                                                                                                   \
  KERNEL(average_##name, void* into, const __grid_constant__ Blocks blocks, u32 many, u64 count, u32 world) {         \
    const Average<Element_##name, Element_##name> work = {world};                                                     \
    take_all(into, blocks, many, count, work);                                                                        \
  }                                                                                                                   \
  KERNEL(average_sums_##name, void* into, const __grid_constant__ Blocks blocks, u32 many, u64 count, u32 world) {    \
    const Average<Element_##name, Element_##name::Sum> work = {world};                                                \
    take_all(into, blocks, many, count, work);                                                                        \
  }

#define TRUTHS(name) FOLD(band, name) FOLD(bor, name) FOLD(bxor, name)
#define FLOATS(name) FOLD(sum, name) FOLD(product, name) FOLD(min, name) FOLD(max, name) SUMS(name)
#define INTEGERS(name) FLOATS(name) TRUTHS(name)

#ifdef MODULE
MODULE
#else
TRUTHS(bool)
INTEGERS(uint8)
INTEGERS(int8)
INTEGERS(uint16)
INTEGERS(int16)
INTEGERS(uint32)
INTEGERS(int32)
INTEGERS(uint64)
INTEGERS(int64)
FLOATS(float16)
FLOATS(bfloat16)
FLOATS(float32)
FLOATS(float64)
#endif
