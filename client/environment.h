// What the client takes from the environment; nothing else of it reads any.
#pragma once

#include <string>
#include <string_view>

namespace forebay::client {

inline constexpr char kDefaultSocket[] = "/run/forebay/forebay.sock";

// `request`, else FOREBAY_SOCKET, else kDefaultSocket.
std::string SocketPath(std::string_view request);

}  // namespace forebay::client
