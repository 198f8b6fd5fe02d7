// What the kernels over affine codes share: how codes become weights, and how x is read.

// The unsigned number at bits p and up of `word`, which nothing else is set in, as a float. `base`
// is the bits of 2^(23 - p): there the last place of a float is 2^-p, so the bits of the number,
// left where they are, are exactly its value above the base. An `or` and a subtraction instead of a
// shift and a conversion of an integer, which Apple GPUs do at a quarter of the rate.
inline float lifted(uint word, uint base) {
  return as_type<float>(base | word) - as_type<float>(base);
}

// Codes 4 j to 4 j + 3 of sixteen bytes that hold 128 / BITS of them, lowest bits first.
template <int BITS>
inline float4 four_codes(uint4 words, int j) {
  if constexpr (BITS == 4) {
    const uint u = words[j / 2] >> (16 * (j % 2));
    return float4(
        lifted(u & 0xFu, 0x4B000000u),
        lifted(u & 0xF0u, 0x49000000u),
        lifted(u & 0xF00u, 0x47000000u),
        lifted(u & 0xF000u, 0x45000000u));
  } else {
    const uint u = words[j];
    const uint v = u >> 16;
    return float4(
        lifted(u & 0xFFu, 0x4B000000u),
        lifted(u & 0xFF00u, 0x47000000u),
        lifted(v & 0xFFu, 0x4B000000u),
        lifted(v & 0xFF00u, 0x47000000u));
  }
}

template <typename T>
inline float4 four_values(const device T* from) {
  const vec<T, 4> x = *(const device vec<T, 4>*)(from);
  return float4(float(x.x), float(x.y), float(x.z), float(x.w));
}
