// How functions of the C ABI end. An exception must not leave them: whoever calls is no C++, and the process would end.
#pragma once

#include <cstdio>
#include <exception>
#include <new>
#include <stdexcept>
#include <system_error>

namespace di {

enum Status : int { kDone = 0, kRefused = 1, kNoMemory = 2, kFailed = 3 };  // as in status.py

// What the thread's last call that was not done says of itself.
inline char* reason() {
  static thread_local char text[256];
  return text;
}

inline int ended(Status status, const char* why) noexcept {
  std::snprintf(reason(), 256, "%s", why);
  return status;
}

// Calls f. What it throws becomes a status: `invalid_argument` refuses what was asked for.
template <class F>
inline int guarded(F f) noexcept {
  try {
    f();
    return kDone;
  } catch (const std::invalid_argument& error) {
    return ended(kRefused, error.what());
  } catch (const std::bad_alloc&) {
    return ended(kNoMemory, "kernels get no more memory");
  } catch (const std::length_error&) {
    return ended(kNoMemory, "kernels would need more memory than there can be");
  } catch (const std::system_error& error) {
    char text[256];
    std::snprintf(text, sizeof text, "kernels get no more threads: %s", error.what());
    return ended(kFailed, text);
  } catch (const std::exception& error) {
    return ended(kFailed, error.what());
  } catch (...) {
    return ended(kFailed, "kernels failed");
  }
}

}  // namespace di

extern "C" {

const char* di_reason() { return di::reason(); }

}  // extern "C"
