#include "reduce.h"

#include <cstdint>
#include <cstring>

namespace fakenccl {

namespace {

struct BFloat16 {
  uint16_t bits;
  BFloat16() = default;
  explicit BFloat16(float value) {
    uint32_t wide;
    memcpy(&wide, &value, sizeof wide);
    // To the nearest, ties to even.
    bits = static_cast<uint16_t>((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
  }
  explicit operator float() const {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
  }
};

template <class T>
T load(const char* bytes) {
  T value;
  memcpy(&value, bytes, sizeof value);
  return value;
}

template <class Wide>
Wide two(Wide left, Wide right, Op op) {
  switch (op) {
    case Op::Product: return static_cast<Wide>(left * right);
    case Op::Max: return left > right ? left : right;
    case Op::Min: return left < right ? left : right;
    default: return static_cast<Wide>(left + right);
  }
}

// `Wide` is what a `T` is computed in.
template <class T, class Wide>
struct Arithmetic {
  static void scale(std::string& elements, const char* factor) {
    const Wide by = static_cast<Wide>(load<T>(factor));
    for (size_t at = 0; at < elements.size(); at += sizeof(T)) {
      const T product = static_cast<T>(static_cast<Wide>(load<T>(&elements[at])) * by);
      memcpy(&elements[at], &product, sizeof product);
    }
  }

  static void fold(char* into, const std::vector<std::string>& ranks, Op op) {
    for (size_t at = 0; at < ranks[0].size(); at += sizeof(T)) {
      Wide sum = static_cast<Wide>(load<T>(&ranks[0][at]));
      for (size_t rank = 1; rank < ranks.size(); rank++) {
        sum = two<Wide>(sum, static_cast<Wide>(load<T>(&ranks[rank][at])), op);
      }
      if (op == Op::Avg) sum = static_cast<Wide>(sum / static_cast<Wide>(ranks.size()));
      const T result = static_cast<T>(sum);
      memcpy(into + at, &result, sizeof result);
    }
  }
};

// Calls `use` with the arithmetic of a type.
template <class Use>
void with(Type type, Use use) {
  switch (type) {
    case Type::I8: return use(Arithmetic<int8_t, int32_t>());
    case Type::U8: return use(Arithmetic<uint8_t, uint32_t>());
    case Type::I32: return use(Arithmetic<int32_t, int64_t>());
    case Type::U32: return use(Arithmetic<uint32_t, uint64_t>());
    case Type::I64: return use(Arithmetic<int64_t, int64_t>());
    case Type::U64: return use(Arithmetic<uint64_t, uint64_t>());
    case Type::F16: return use(Arithmetic<_Float16, float>());
    case Type::F32: return use(Arithmetic<float, float>());
    case Type::F64: return use(Arithmetic<double, double>());
    case Type::BF16: return use(Arithmetic<BFloat16, float>());
    default: return;  // Refused before.
  }
}

}  // namespace

size_t size_of(Type type) {
  static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  const auto index = static_cast<size_t>(type);
  return index < sizeof sizes / sizeof sizes[0] ? sizes[index] : 0;
}

void scale(std::string& elements, const char* factor, Type type) {
  with(type, [&](auto arithmetic) { arithmetic.scale(elements, factor); });
}

void fold(char* into, const std::vector<std::string>& ranks, Type type, Op op) {
  with(type, [&](auto arithmetic) { arithmetic.fold(into, ranks, op); });
}

}  // namespace fakenccl
