// SPDX-License-Identifier: Apache-2.0
#include "tools/forebay/kept_run.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <sstream>
#include <system_error>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "nlohmann/json.hpp"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"

namespace forebay::tools {

// The saved state of a run. The name is that of its folder.
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(KeptTraining, job, step)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(KeptRun, places, paths, swap_bytes, dram_bytes, dram, config,
                                   settings, run, trainings)

namespace {

namespace fs = std::filesystem;
using protocol::ErrnoText;
using protocol::ErrorId;
using protocol::MakeError;
using protocol::UniqueFd;

constexpr char kRunsFolder[] = "runs";
constexpr char kLockName[] = "lock";
constexpr char kStateName[] = "run.json";
constexpr char kSwapFolderStart[] = "forebay-kept-";
constexpr size_t kNameBytesMax = 64;

absl::Status CheckName(const std::string& name) {
  const auto is_allowed = [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '_' || c == '-';
  };
  const bool is_name = !name.empty() && name.size() <= kNameBytesMax && name[0] != '.' &&
                       std::ranges::all_of(name, is_allowed);
  if (is_name) return absl::OkStatus();
  return MakeError(
      ErrorId::kOption,
      absl::StrCat("\"", absl::CHexEscape(name.substr(0, kNameBytesMax)), "\" names no kept run"),
      absl::StrCat("use 1 to ", kNameBytesMax,
                   " characters of A-Z, a-z, 0-9, '.', '_', '-'; the first one is no '.'"));
}

absl::Status CheckStateFolder(const fs::path& state_folder) {
  if (!state_folder.empty()) return absl::OkStatus();
  return MakeError(ErrorId::kOption, "there is no folder for the names of kept runs",
                   "set XDG_STATE_HOME, or HOME, to an absolute path");
}

UniqueFd Lock(const fs::path& folder) {
  UniqueFd lock(::open((folder / kLockName).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (lock.valid() && ::flock(lock.get(), LOCK_EX | LOCK_NB) != 0) lock.Reset();
  return lock;
}

absl::Status WriteDurably(const fs::path& path, const std::string& text) {
  const std::string made = path.string() + ".new";
  const UniqueFd file(::open(made.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
  const bool is_written = file.valid() &&
                          ::write(file.get(), text.data(), text.size()) == std::ssize(text) &&
                          ::fsync(file.get()) == 0 && ::rename(made.c_str(), path.c_str()) == 0;
  if (is_written) return absl::OkStatus();
  return MakeError(ErrorId::kOption, ErrnoText(absl::StrCat("write ", path.string()), errno),
                   "make room in that folder, or name another one with XDG_STATE_HOME");
}

// Returns eight random hexadecimal digits. They distinguish the folders of several runs in the same place.
std::string Suffix() {
  std::string bytes(4, '\0');
  (void)!::getrandom(bytes.data(), bytes.size(), 0);
  return absl::BytesToHexString(bytes);
}

}  // namespace

std::string Describe(const std::vector<KeptTraining>& trainings) {
  if (trainings.empty()) return "no training";
  return absl::StrJoin(trainings, ", ", [](std::string* out, const KeptTraining& training) {
    absl::StrAppend(out, training.job, " at step ", training.step);
  });
}

KeptRunFile::KeptRunFile(fs::path folder, UniqueFd lock)
    : folder_(std::move(folder)), lock_(std::move(lock)) {}

absl::StatusOr<KeptRunFile> KeptRunFile::Create(const fs::path& state_folder, KeptRun run) {
  RETURN_IF_ERROR(CheckName(run.name));
  RETURN_IF_ERROR(CheckStateFolder(state_folder));
  const fs::path runs = state_folder / kRunsFolder;
  std::error_code ignored;
  fs::create_directories(runs, ignored);
  const fs::path folder = runs / run.name;
  if (::mkdir(folder.c_str(), 0700) != 0) {
    if (errno != EEXIST) {
      return MakeError(ErrorId::kOption, ErrnoText(absl::StrCat("make ", folder.string()), errno),
                       "name a folder that is writable with XDG_STATE_HOME");
    }
    const auto kept = ReadKeptRun(state_folder, run.name);
    const std::string trainings = kept.ok() ? Describe(kept->trainings) : "unreadable";
    return MakeError(ErrorId::kOption,
                     absl::StrCat("--keep ", run.name, ": a run of this name is kept: ", trainings),
                     absl::StrCat("go on with it: forebay run --resume ", run.name,
                                  " -- COMMAND; give it up: forebay run --forget ", run.name));
  }
  KeptRunFile file(folder, Lock(folder));
  const std::string swap_folder = absl::StrCat(kSwapFolderStart, run.name, "-", Suffix());
  for (const std::string& place : run.places) {
    const bool is_device = fs::is_block_file(place, ignored);
    run.paths.push_back(is_device ? place : (fs::path(place) / swap_folder).string());
  }
  // The saved state names the folders before the folders are created: after a kill no folder exists without a name.
  absl::Status status = file.Save(std::move(run));
  if (status.ok()) status = file.MakeSwapFolders();
  if (status.ok()) return file;
  (void)file.Remove();
  return status;
}

absl::Status KeptRunFile::MakeSwapFolders() {
  for (size_t i = 0; i < run_.paths.size(); ++i) {
    if (run_.paths[i] == run_.places[i] || ::mkdir(run_.paths[i].c_str(), 0700) == 0) continue;
    return MakeError(ErrorId::kSwapPath, ErrnoText(absl::StrCat("make ", run_.paths[i]), errno),
                     "name a directory that exists and is writable, on a disk with O_DIRECT");
  }
  return absl::OkStatus();
}

absl::StatusOr<KeptRunFile> KeptRunFile::Open(const fs::path& state_folder,
                                              const std::string& name) {
  RETURN_IF_ERROR(CheckName(name));
  RETURN_IF_ERROR(CheckStateFolder(state_folder));
  const fs::path folder = state_folder / kRunsFolder / name;
  std::error_code ignored;
  if (!fs::is_directory(folder, ignored)) {
    const std::vector<std::string> names = KeptRunNames(state_folder);
    return MakeError(ErrorId::kOption,
                     absl::StrCat("no run is kept as ", name, "; kept are: ",
                                  names.empty() ? "none" : absl::StrJoin(names, ", ")),
                     "forebay run --kept shows them; begin one: forebay run --keep NAME --swap "
                     "FOLDER -- COMMAND");
  }
  UniqueFd lock = Lock(folder);
  if (!lock.valid()) {
    return MakeError(ErrorId::kBusy, absl::StrCat("kept run ", name, " is in use"),
                     "wait until the `forebay run` that has it ends, or end it");
  }
  KeptRunFile file(folder, std::move(lock));
  ASSIGN_OR_RETURN(file.run_, ReadKeptRun(state_folder, name));
  return file;
}

absl::StatusOr<KeptRun> ReadKeptRun(const fs::path& state_folder, const std::string& name) {
  const fs::path folder = state_folder / kRunsFolder / name;
  std::stringstream text;
  text << std::ifstream(folder / kStateName).rdbuf();
  try {
    KeptRun run = nlohmann::json::parse(text.str());
    run.name = name;
    return run;
  } catch (const nlohmann::json::exception& error) {
    return MakeError(
        ErrorId::kCorrupt,
        absl::StrCat((folder / kStateName).string(), " cannot be read: ", error.what()),
        absl::StrCat("remove ", folder.string(), ", and ", kSwapFolderStart, name,
                     "-* where its swap is"));
  }
}

absl::Status KeptRunFile::Save(KeptRun run) {
  run_ = std::move(run);
  return WriteDurably(folder_ / kStateName, nlohmann::json(run_).dump(2) + "\n");
}

absl::Status KeptRunFile::Remove() {
  std::error_code error;
  for (size_t i = 0; i < run_.paths.size(); ++i) {
    if (run_.paths[i] == run_.places[i]) continue;
    fs::remove_all(run_.paths[i], error);
    if (error) {
      return MakeError(ErrorId::kSwapPath,
                       absl::StrCat("remove ", run_.paths[i], ": ", error.message()),
                       "make that folder writable, then forget the run again");
    }
  }
  fs::remove_all(folder_, error);
  if (!error) return absl::OkStatus();
  return MakeError(ErrorId::kOption,
                   absl::StrCat("remove ", folder_.string(), ": ", error.message()),
                   "remove that folder");
}

std::vector<std::string> KeptRunNames(const fs::path& state_folder) {
  std::vector<std::string> names;
  std::error_code error;
  fs::directory_iterator at(state_folder / kRunsFolder, error);
  for (const fs::directory_iterator end; !error && at != end; at.increment(error)) {
    names.push_back(at->path().filename().string());
  }
  std::ranges::sort(names);
  return names;
}

}  // namespace forebay::tools
