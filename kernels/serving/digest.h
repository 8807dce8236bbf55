// SHA-256 (FIPS 180-4) of bytes, and CRC-32 as zlib's.
#pragma once
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

namespace funcrec::serving {

class Sha256 {
 public:
  void add(std::string_view bytes) {
    size_ += bytes.size();
    for (; !bytes.empty();) {
      const size_t n = std::min(bytes.size(), sizeof block_ - used_);
      std::memcpy(block_ + used_, bytes.data(), n);
      bytes.remove_prefix(n);
      if ((used_ += n) == sizeof block_) mix();
    }
  }

  // Returns 64 digits; after this call nothing may be added.
  std::string hex() {
    const uint64_t bits = 8 * size_;
    add(std::string_view("\x80", 1));
    while (used_ != 56) add(std::string_view("\0", 1));
    for (int i = 0; i < 8; i++) block_[56 + i] = uint8_t(bits >> (56 - 8 * i));
    mix();
    std::string out;
    for (uint32_t word : h_)
      for (int shift = 28; shift >= 0; shift -= 4) out += "0123456789abcdef"[word >> shift & 15];
    return out;
  }

 private:
  static constexpr uint32_t K[64] = {
      0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be,
      0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa,
      0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85,
      0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3,
      0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f,
      0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

  void mix() {
    uint32_t w[64];
    for (int i = 0; i < 16; i++)
      w[i] = uint32_t(block_[4 * i]) << 24 | uint32_t(block_[4 * i + 1]) << 16 | uint32_t(block_[4 * i + 2]) << 8 | block_[4 * i + 3];
    for (int i = 16; i < 64; i++) {
      const uint32_t a = w[i - 15], b = w[i - 2];
      w[i] = w[i - 16] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ a >> 3) + w[i - 7] + (std::rotr(b, 17) ^ std::rotr(b, 19) ^ b >> 10);
    }
    auto [a, b, c, d, e, f, g, h] = h_;
    for (int i = 0; i < 64; i++) {
      const uint32_t one = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) + ((e & f) ^ (~e & g)) + K[i] + w[i];
      const uint32_t two = (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + one, d = c, c = b, b = a, a = one + two;
    }
    const uint32_t now[8] = {a, b, c, d, e, f, g, h};
    for (int i = 0; i < 8; i++) h_[i] += now[i];
    used_ = 0;
  }

  std::array<uint32_t, 8> h_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  uint8_t block_[64];
  size_t used_ = 0;
  uint64_t size_ = 0;
};

inline std::string sha256(std::string_view bytes) {
  Sha256 s;
  s.add(bytes);
  return s.hex();
}

// Takes eight bytes at a time, by eight tables.
inline uint32_t crc32(std::span<const char> bytes) {
  static const auto tables = [] {
    std::array<std::array<uint32_t, 256>, 8> t{};
    for (uint32_t i = 0; i < 256; i++) {
      uint32_t c = i;
      for (int k = 0; k < 8; k++) c = c & 1 ? 0xedb88320 ^ c >> 1 : c >> 1;
      t[0][i] = c;
    }
    for (int j = 1; j < 8; j++)
      for (int i = 0; i < 256; i++) t[j][i] = t[0][t[j - 1][i] & 255] ^ t[j - 1][i] >> 8;
    return t;
  }();
  uint32_t c = ~uint32_t(0);
  size_t i = 0;
  for (; i + 8 <= bytes.size(); i += 8) {
    uint32_t low, high;
    std::memcpy(&low, &bytes[i], 4), std::memcpy(&high, &bytes[i + 4], 4);
    low ^= c;
    c = tables[7][low & 255] ^ tables[6][low >> 8 & 255] ^ tables[5][low >> 16 & 255] ^ tables[4][low >> 24] ^ tables[3][high & 255] ^
        tables[2][high >> 8 & 255] ^ tables[1][high >> 16 & 255] ^ tables[0][high >> 24];
  }
  for (; i < bytes.size(); i++) c = tables[0][(c ^ uint8_t(bytes[i])) & 255] ^ c >> 8;
  return ~c;
}

}  // namespace funcrec::serving
