// SPDX-License-Identifier: Apache-2.0
// forebay-gateway: connects a daemon with trainers on other nodes. As a service it is a client of the daemon for principals on
// other nodes. As an agent (`connect`, which the client library starts) it serves one trainer on its node.

#include <signal.h>
#include <stdlib.h>

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "daemon/gateway/agent_server.h"
#include "daemon/gateway/gateway_config.h"
#include "daemon/gateway/gateway_server.h"
#include "protocol/error.h"
#include "protocol/standard_output.h"
#include "spdlog/sinks/stdout_sinks.h"
#include "spdlog/spdlog.h"

extern "C" char** environ;

namespace {

using forebay::protocol::UniqueFd;

constexpr int kExitError = 1;

int Fail(const absl::Status& status) {
  if (!absl::IsCancelled(status)) {  // cancelled: the reader of the output has closed it
    forebay::protocol::PrintError(status);
  }
  return kExitError;
}

// Removes the variables of UCX: the file of settings alone determines how the service uses UCX.
void ForgetUcxVariables() {
  std::vector<std::string> names;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string text = *variable;
    if (text.starts_with("UCX_")) names.push_back(text.substr(0, text.find('=')));
  }
  for (const std::string& name : names) ::unsetenv(name.c_str());
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("The way from forebayd to trainers on other nodes, over TLS and UCX",
               "forebay-gateway");
  app.set_version_flag("--version", "forebay-gateway " FOREBAY_VERSION);
  std::string config_path = "/etc/forebay/gateway.toml";
  bool only_checks = false;
  app.add_option("--config", config_path, "settings");
  app.add_flag("--check", only_checks, "only check the settings");
  CLI::App* const connect = app.add_subcommand("connect", "serve one trainer (started by it)");
  std::string address;
  std::string folder;
  int trainer_fd = -1;
  int lifetime_fd = -1;
  connect->add_option("--address", address, "HOST:PORT of the gateway")->required();
  connect->add_option("--folder", folder, "of ca.pem, and cert.pem with key.pem or token")
      ->required();
  connect->add_option("--socket-fd", trainer_fd, "the trainer's socket")->required();
  connect->add_option("--lifetime-fd", lifetime_fd, "a pidfd of the trainer");
  int weights_fd = -1;
  int grad_arena_fd = -1;
  connect->add_option("--weights-fd", weights_fd, "the window of a rank that comes back");
  connect->add_option("--grad-arena-fd", grad_arena_fd, "and its gradient arena");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::ostringstream text;
    const int code = app.exit(error, text, std::cerr);
    const absl::Status written = forebay::protocol::WriteOutput(text.str());
    return written.ok() ? code : Fail(written);
  }

  ::signal(SIGPIPE, SIG_IGN);
  spdlog::set_default_logger(spdlog::stderr_logger_mt("forebay-gateway"));
  if (connect->parsed()) {
    // Ignores signals from the trainer's terminal: the trainer decides which of them end it, and the agent ends with it.
    ::signal(SIGINT, SIG_IGN);
    ::signal(SIGHUP, SIG_IGN);
    const absl::Status status =
        forebay::gateway::ServeAgent({.address = address,
                                      .folder = folder,
                                      .trainer = UniqueFd(trainer_fd),
                                      .lifetime = UniqueFd(lifetime_fd),
                                      .weights = UniqueFd(weights_fd),
                                      .grad_arena = UniqueFd(grad_arena_fd)});
    return status.ok() ? 0 : Fail(status);
  }
  ForgetUcxVariables();
  const auto config = forebay::gateway::LoadGatewayConfig(config_path);
  if (!config.ok()) return Fail(config.status());
  const absl::Status status = only_checks ? forebay::gateway::CheckGateway(*config)
                                          : forebay::gateway::ServeGateway(*config);
  return status.ok() ? 0 : Fail(status);
}
