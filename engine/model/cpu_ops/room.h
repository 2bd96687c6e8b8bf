// Memory to work in.

#pragma once

#include <cstdint>
#include <memory>
#include <new>

namespace {

// Room for numbers, which grows as it is asked for. What lies in it is whatever was there before.
template <typename Number>
class Room {
 public:
  // At least `size` numbers. What had been given before may be gone.
  Number* with(int64_t size) {
    if (size > size_) {
      numbers_.reset(static_cast<Number*>(::operator new(size * sizeof(Number), LINE)));
      size_ = size;
    }
    return numbers_.get();
  }

 private:
  static constexpr std::align_val_t LINE{64};  // Bytes that caches move together.

  struct Free {
    void operator()(Number* numbers) const { ::operator delete(numbers, LINE); }
  };

  std::unique_ptr<Number, Free> numbers_;
  int64_t size_ = 0;
};

}  // namespace
