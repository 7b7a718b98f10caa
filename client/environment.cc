#include "client/environment.h"

#include <cstdlib>

namespace forebay::client {

std::string SocketPath(std::string_view request) {
  if (!request.empty()) return std::string(request);
  const char* from_environment = std::getenv("FOREBAY_SOCKET");
  if (from_environment != nullptr && *from_environment != '\0') return from_environment;
  return kDefaultSocket;
}

}  // namespace forebay::client
