#include "client/environment.h"

#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>

#include "absl/strings/str_cat.h"

namespace forebay::client {

std::string SocketPath(std::string_view request) {
  if (!request.empty()) return std::string(request);
  const char* from_environment = std::getenv("FOREBAY_SOCKET");
  if (from_environment != nullptr && *from_environment != '\0') return from_environment;
  return kDefaultSocket;
}

std::string RunToken(std::string_view request) {
  if (!request.empty()) return std::string(request);
  const char* from_environment = std::getenv("FOREBAY_RUN");
  if (from_environment != nullptr && *from_environment != '\0') return from_environment;
  return ProcessToken();
}

std::string ProcessToken() {
  constexpr int kFieldsAfterName = 20;  // up to and with the start time
  std::ifstream file("/proc/self/stat");
  const std::string stat((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  // The name of the program stands in parentheses and may hold anything.
  const size_t name_end = stat.rfind(')');
  std::istringstream fields(name_end == std::string::npos ? "" : stat.substr(name_end + 1));
  std::string field;
  for (int i = 0; i < kFieldsAfterName; ++i) fields >> field;
  return absl::StrCat("pid-", ::getpid(), "-", field);
}

}  // namespace forebay::client
