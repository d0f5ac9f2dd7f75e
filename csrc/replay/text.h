// Ids of a log in text (torchrec_hkv/replay/text.py). CPU only.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace torchrec_hkv::replay {

enum class TextKind { kInteger, kHexadecimal, kText };

// A field that does not have the expected form.
struct TextFault {
  int64_t line = -1;  // in the block; -1: no fault
  int64_t fields = 0;
  int column = -1;  // index of the parsed column whose field is no number; -1: the number of fields
  std::string_view text;
};

// The ids of a column of a block.
struct TextColumn {
  int64_t field;  // index among the fields of a line
  TextKind kind;
  int64_t* values;             // with room for an id of each line
  int64_t count = 0;           // ids
  std::vector<int64_t> lines;  // of each id; empty if each line has one
};

// Parses a block of whole lines, each of `fields` fields. Returns the number of lines.
// columns: by ascending field.
//
// Quotes around a field and the carriage return at the end of a line are left out. Integers have 64
// bits; from 2^63 on they are the int64 with the same bits. Texts are hashed. An empty field is no
// id.
int64_t parse_text(std::string_view block, std::string_view separator, int64_t fields,
                   std::vector<TextColumn>* columns, TextFault* fault);

// A hash of 64 bits (FNV-1a).
int64_t hash_of_text(std::string_view text);

}  // namespace torchrec_hkv::replay
