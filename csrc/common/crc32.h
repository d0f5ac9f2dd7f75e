// CRC-32 as zlib computes it: the reflected polynomial 0xedb88320, inverted before and after.
#pragma once

#include <cstddef>
#include <cstdint>

namespace torchrec_hkv {

// Continues a checksum with more data; 0 begins one. Processors with carry-less multiplication
// compute it at about the speed at which they read memory.
uint32_t crc32(uint32_t value, const void* data, size_t size);

// As crc32, by tables, for any processor.
uint32_t crc32_by_tables(uint32_t value, const void* data, size_t size);

}  // namespace torchrec_hkv
