// SPDX-License-Identifier: Apache-2.0
// spdlog, of which Debian has no archive: what its src/ compiles of the loggers to stderr.

#include <spdlog/async.h>
#include <spdlog/async_logger-inl.h>
#include <spdlog/common-inl.h>
#include <spdlog/details/backtracer-inl.h>
#include <spdlog/details/log_msg-inl.h>
#include <spdlog/details/log_msg_buffer-inl.h>
#include <spdlog/details/null_mutex.h>
#include <spdlog/details/os-inl.h>
#include <spdlog/details/periodic_worker-inl.h>
#include <spdlog/details/registry-inl.h>
#include <spdlog/details/thread_pool-inl.h>
#include <spdlog/logger-inl.h>
#include <spdlog/pattern_formatter-inl.h>
#include <spdlog/sinks/ansicolor_sink-inl.h>
#include <spdlog/sinks/base_sink-inl.h>
#include <spdlog/sinks/sink-inl.h>
#include <spdlog/sinks/stdout_color_sinks-inl.h>
#include <spdlog/sinks/stdout_sinks-inl.h>
#include <spdlog/spdlog-inl.h>

#include <memory>
#include <string>

namespace spdlog {

template class sinks::base_sink<details::console_mutex::mutex_t>;
template class sinks::base_sink<details::null_mutex>;
template class sinks::stdout_sink_base<details::console_mutex>;
template class sinks::stderr_sink<details::console_mutex>;
template class sinks::ansicolor_sink<details::console_mutex>;
template class sinks::ansicolor_stdout_sink<details::console_mutex>;
template SPDLOG_API std::shared_ptr<logger> stderr_logger_mt<synchronous_factory>(
    const std::string& name);

}  // namespace spdlog
