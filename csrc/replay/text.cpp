#include "replay/text.h"

#include <charconv>
#include <cstring>
#include <numeric>

namespace torchrec_hkv::replay {
namespace {

constexpr uint64_t kFnvBasis = 0xcbf29ce484222325ull, kFnvPrime = 0x100000001b3ull;
// Most digits of a number of 64 bits.
constexpr size_t kMaxDecimal = 20, kMaxHexadecimal = 16;

std::string_view trimmed(std::string_view field) {
  if (!field.empty() && field.back() == '\r') field.remove_suffix(1);
  if (field.size() > 1 && field.front() == '"' && field.back() == '"') {
    field.remove_prefix(1);
    field.remove_suffix(1);
  }
  return field;
}

// Parses a field that is not empty. Returns false if it is no number of 64 bits.
bool parse_number(std::string_view field, TextKind kind, int64_t* value) {
  const bool minus = field.front() == '-';
  if (minus || field.front() == '+') field.remove_prefix(1);
  const bool decimal = kind == TextKind::kInteger;
  if (field.empty() || field.size() > (decimal ? kMaxDecimal : kMaxHexadecimal)) return false;
  uint64_t number = 0;
  const char* const end = field.data() + field.size();
  const auto [stop, error] = std::from_chars(field.data(), end, number, decimal ? 10 : 16);
  if (stop != end || error != std::errc()) return false;
  if (minus && number > uint64_t{1} << 63) return false;
  *value = static_cast<int64_t>(minus ? uint64_t{0} - number : number);
  return true;
}

// Reads eight bytes, the first as the lowest. Returns whether all are digits.
bool are_digits(const char* at, uint64_t* eight) {
  std::memcpy(eight, at, 8);
  constexpr uint64_t kUpper = 0xf0f0f0f0f0f0f0f0ull, kZeros = 0x3030303030303030ull;
  // Adding 6 changes the upper half of what follows '9'.
  return (*eight & kUpper) == kZeros && ((*eight + 0x0606060606060606ull) & kUpper) == kZeros;
}

// The number that eight digits form: neighbours are joined to lanes twice as wide, three times.
uint64_t number_of(uint64_t eight) {
  eight = (eight & 0x0f0f0f0f0f0f0f0full) * ((10 << 8) + 1) >> 8;
  eight = (eight & 0x00ff00ff00ff00ffull) * ((100 << 16) + 1) >> 16;
  return (eight & 0x0000ffff0000ffffull) * ((uint64_t{10'000} << 32) + 1) >> 32;
}

class Parser {
 public:
  Parser(std::string_view block, std::string_view separator)
      : at_(block.data()), end_(block.data() + block.size()), separator_(separator) {}

  bool is_at_end() const { return at_ == end_; }

  // The next field of the line. Sets *is_last to whether it is the last one.
  std::string_view field(bool* is_last) {
    const char* const begin = at_;
    const char first = separator_.front();
    for (; at_ != end_ && *at_ != '\n'; ++at_) {
      if (*at_ == first && (separator_.size() == 1 || is_separator())) {
        const std::string_view found(begin, static_cast<size_t>(at_ - begin));
        at_ += separator_.size();
        *is_last = false;
        return found;
      }
    }
    const std::string_view found(begin, static_cast<size_t>(at_ - begin));
    if (at_ != end_) ++at_;
    *is_last = true;
    return found;
  }

  // As `field`, for an integer of up to 19 digits, which fit in 64 bits, without quotes or other
  // marks. Returns whether there is one.
  bool plain_integer(int64_t* value, bool* is_last) {
    const bool minus = at_ != end_ && *at_ == '-';
    const char* const begin = at_ + (minus ? 1 : 0);
    const char* const most = end_ - begin > 19 ? begin + 19 : end_;
    const char* at = begin;
    uint64_t number = 0;
    for (uint64_t eight; most - at >= 8 && are_digits(at, &eight); at += 8) {
      number = 100'000'000 * number + number_of(eight);
    }
    for (; at != most; ++at) {
      const auto digit = static_cast<unsigned char>(*at - '0');
      if (digit > 9) break;
      number = 10 * number + digit;
    }
    if (at == begin || at == end_ || (minus && number > uint64_t{1} << 63)) return false;
    if (*at == '\n') {
      *is_last = true;
    } else if (*at == separator_.front() && separator_.size() == 1) {
      *is_last = false;
    } else {
      return false;
    }
    at_ = at + 1;
    *value = static_cast<int64_t>(minus ? uint64_t{0} - number : number);
    return true;
  }

 private:
  bool is_separator() const {
    return static_cast<size_t>(end_ - at_) >= separator_.size() &&
           std::memcmp(at_, separator_.data(), separator_.size()) == 0;
  }

  const char* at_;
  const char* end_;
  std::string_view separator_;
};

// Collects the ids of a column.
class Column {
 public:
  explicit Column(TextColumn* column) : column_(column) {}

  void add(int64_t line, int64_t value) {
    if (some_are_missing_) column_->lines.push_back(line);
    column_->values[column_->count++] = value;
  }
  void skip(int64_t line) {
    if (some_are_missing_) return;
    some_are_missing_ = true;
    column_->lines.resize(static_cast<size_t>(line));
    std::iota(column_->lines.begin(), column_->lines.end(), int64_t{0});
  }
  const TextColumn& of() const { return *column_; }

 private:
  TextColumn* column_;
  bool some_are_missing_ = false;
};

}  // namespace

int64_t hash_of_text(std::string_view text) {
  uint64_t hash = kFnvBasis;
  for (const char byte : text) hash = (hash ^ static_cast<unsigned char>(byte)) * kFnvPrime;
  return static_cast<int64_t>(hash);
}

int64_t parse_text(std::string_view block, std::string_view separator, int64_t fields,
                   std::vector<TextColumn>* columns, TextFault* fault) {
  std::vector<Column> parsed;
  for (TextColumn& column : *columns) parsed.emplace_back(&column);
  Parser parser(block, separator);
  int64_t line = 0;
  for (; !parser.is_at_end(); ++line) {
    bool is_last = false;
    size_t next = 0;
    int64_t count = 0;
    TextFault no_number;
    for (; !is_last; ++count) {
      int64_t value = 0;
      if (next == parsed.size() || parsed[next].of().field != count) {
        parser.field(&is_last);
        continue;
      }
      Column& column = parsed[next++];
      const TextKind kind = column.of().kind;
      if (kind == TextKind::kInteger && parser.plain_integer(&value, &is_last)) {
        column.add(line, value);
        continue;
      }
      const std::string_view text = trimmed(parser.field(&is_last));
      if (text.empty()) {
        column.skip(line);
      } else if (kind == TextKind::kText) {
        column.add(line, hash_of_text(text));
      } else if (parse_number(text, kind, &value)) {
        column.add(line, value);
      } else if (no_number.line < 0) {
        no_number = {line, fields, static_cast<int>(next) - 1, text};
      }
    }
    if (count != fields) {
      *fault = {line, count, -1, {}};
      return line;
    }
    if (no_number.line >= 0) {
      *fault = no_number;
      return line;
    }
  }
  return line;
}

}  // namespace torchrec_hkv::replay
