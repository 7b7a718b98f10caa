// SPDX-License-Identifier: Apache-2.0
#include "client/window_registry.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <string_view>
#include <utility>

#include "client/internal/written_pages.h"

namespace forebay::client {
namespace {

struct Window {
  uintptr_t begin = 0;
  uintptr_t end = 0;
  std::string job;
  std::vector<WindowPart> parts;
  std::unique_ptr<internal::WrittenPages> own_pages = nullptr;
  // Points to own_pages: a signal handler sees all of it or nothing.
  std::atomic<internal::WrittenPages*> pages = nullptr;

  bool Has(uintptr_t address) const { return begin <= address && address < end; }
};

std::array<std::atomic<Window*>, kWindowsMax> windows;
std::atomic<int> readers{0};  // signal handlers that look at the table now
struct sigaction previous_action;

// A line on the stack, written with one write(2).
class SignalText {
 public:
  SignalText& Add(std::string_view text) {
    for (const char letter : text) {
      if (size_ < buffer_.size()) buffer_[size_++] = letter;
    }
    return *this;
  }
  SignalText& Add(uint64_t number) {
    std::array<char, 20> digits{};
    size_t begin = digits.size();
    do {
      digits[--begin] = static_cast<char>('0' + number % 10);
      number /= 10;
    } while (number > 0);
    return Add(std::string_view(digits.data() + begin, digits.size() - begin));
  }
  void WriteTo(int fd) const {
    for (size_t done = 0; done < size_;) {
      const ssize_t written = ::write(fd, buffer_.data() + done, size_ - done);
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) return;
      done += static_cast<size_t>(written);
    }
  }

 private:
  std::array<char, 2048> buffer_{};
  size_t size_ = 0;
};

const WindowPart* FindPart(const Window& window, uint64_t offset) {
  const auto part = std::ranges::upper_bound(window.parts, offset, {}, &WindowPart::end_bytes);
  return part != window.parts.end() && part->begin_bytes <= offset ? &*part : nullptr;
}

// Calls `use` for the window that has the address; false where none has.
template <typename Use>
bool UseWindowOf(const void* address, const Use& use) {
  const auto number = reinterpret_cast<uintptr_t>(address);
  ++readers;
  Window* window = nullptr;
  for (const std::atomic<Window*>& entry : windows) {
    window = entry.load();
    if (window != nullptr && window->Has(number)) break;
    window = nullptr;
  }
  if (window != nullptr) use(*window, number);
  --readers;
  return window != nullptr;
}

// Makes the pages around `address` private to this process. Returns whether the write can continue.
bool MakePagesOwn(const void* address) {
  bool taken = false;
  UseWindowOf(address, [&taken](Window& window, uintptr_t number) {
    internal::WrittenPages* const pages = window.pages;
    taken = pages != nullptr && pages->MakeOwn(number);
  });
  return taken;
}

void Explain(const Window& window, uintptr_t address, int fd) {
  const uint64_t offset = address - window.begin;
  const WindowPart* part = FindPart(window, offset);
  SignalText text;
  text.Add("forebay: a write into the read-only weights of job ").Add(window.job).Add(": ");
  if (part == nullptr) {
    text.Add("padding at byte ").Add(offset);
  } else {
    text.Add("parameter ").Add(part->param).Add(", element ");
    text.Add((offset - part->begin_bytes) / part->elem_bytes);
    text.Add(" (group ").Add(uint64_t{part->group}).Add(", ").Add(part->group_name).Add(")");
  }
  if (window.pages != nullptr) {
    text.Add(
        "\nhint: the system gives this process no mapping for the pages that it writes: raise "
        "ulimit -v and "
        "vm.max_map_count, or opt.detach() first\n");
    return text.WriteTo(fd);
  }
  text.Add(
      "\nhint: parameters of an attached model change in the optimizer's step alone; load or "
      "initialise weights before attach, or write to a clone()\n");
  text.WriteTo(fd);
}

void OnSegv(int signal_number, siginfo_t* info, void* context) {
  const int saved_errno = errno;
  if (info->si_code == SEGV_ACCERR && MakePagesOwn(info->si_addr)) {
    errno = saved_errno;
    return;
  }
  if (info->si_code > 0) ExplainWrite(info->si_addr, STDERR_FILENO);
  errno = saved_errno;
  if ((previous_action.sa_flags & SA_SIGINFO) != 0) {
    previous_action.sa_sigaction(signal_number, info, context);
  } else if (previous_action.sa_handler != SIG_DFL && previous_action.sa_handler != SIG_IGN) {
    previous_action.sa_handler(signal_number);
  } else {
    // The faulting instruction runs again, or the signal is sent again, and the default action ends
    // the process.
    struct sigaction default_action {};
    default_action.sa_handler = SIG_DFL;
    ::sigaction(signal_number, &default_action, nullptr);
    if (info->si_code <= 0) ::raise(signal_number);
  }
}

}  // namespace

std::vector<WindowPart> WindowParts(const protocol::Layout& layout) {
  std::vector<WindowPart> parts;
  if (!layout.is_shared()) return parts;  // sharded: a cache of slots, no view
  const protocol::LayoutSpec& spec = layout.spec();
  const uint64_t width = SizeBytes(spec.dtype);
  for (size_t i = 0; i < spec.params.size(); ++i) {
    const protocol::ParamPlace& place = layout.params()[i];
    const uint64_t begin =
        layout.groups()[place.group].weights_offset_bytes + place.offset_elems * width;
    parts.push_back({.begin_bytes = begin,
                     .end_bytes = begin + place.elems * width,
                     .elem_bytes = width,
                     .group = place.group,
                     .param = spec.params[i].name,
                     .group_name = spec.group_names[place.group]});
  }
  return parts;
}

WindowRegistration::~WindowRegistration() {
  if (index_ < 0) return;
  std::unique_ptr<Window> window(windows[static_cast<size_t>(index_)].exchange(nullptr));
  // A handler that began before the exchange may still read it: then it is leaked.
  if (readers != 0) window.release();
}

std::unique_ptr<WindowRegistration> RegisterWindow(std::span<const std::byte> window,
                                                   std::string job, std::vector<WindowPart> parts) {
  const auto begin = reinterpret_cast<uintptr_t>(window.data());
  auto entry = std::make_unique<Window>();
  entry->begin = begin;
  entry->end = begin + window.size();
  entry->job = std::move(job);
  entry->parts = std::move(parts);
  for (int i = 0; i < kWindowsMax; ++i) {
    Window* none = nullptr;
    if (windows[static_cast<size_t>(i)].compare_exchange_strong(none, entry.get())) {
      entry.release();  // the table owns it until the registration dies
      return std::unique_ptr<WindowRegistration>(new WindowRegistration(i));
    }
  }
  return std::unique_ptr<WindowRegistration>(new WindowRegistration(-1));
}

bool WindowRegistration::AllowWrites(int file) {
  if (index_ < 0) return false;
  Window& window = *windows[static_cast<size_t>(index_)].load();
  const std::span bytes(reinterpret_cast<const std::byte*>(window.begin),
                        window.end - window.begin);
  window.own_pages = std::make_unique<internal::WrittenPages>(bytes, file);
  window.pages = window.own_pages.get();
  return true;
}

internal::WrittenPages* WindowRegistration::written() const {
  return index_ < 0 ? nullptr : windows[static_cast<size_t>(index_)].load()->pages.load();
}

bool ExplainWrite(const void* address, int fd) {
  return UseWindowOf(address,
                     [fd](const Window& window, uintptr_t number) { Explain(window, number, fd); });
}

void InstallSegvHandler() {
  static std::once_flag installed;
  std::call_once(installed, [] {
    struct sigaction action {};
    action.sa_sigaction = OnSegv;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    ::sigemptyset(&action.sa_mask);
    ::sigaction(SIGSEGV, &action, &previous_action);
  });
}

}  // namespace forebay::client
