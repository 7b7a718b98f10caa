#include "client/environment.h"

#include <cstdlib>

namespace forebay::client {

std::string SocketPath(std::string_view wish) {
  if (!wish.empty()) return std::string(wish);
  const char* from_environment = std::getenv("FOREBAY_SOCKET");
  if (from_environment != nullptr && *from_environment != '\0') return from_environment;
  return kDefaultSocket;
}

}  // namespace forebay::client
