// SPDX-License-Identifier: Apache-2.0
#include "daemon/gateway/tls_files.h"

#include <kj/vector.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <unistd.h>

#include <ctime>
#include <functional>
#include <memory>
#include <string_view>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"

namespace forebay::gateway {
namespace {

using protocol::ErrorId;
using protocol::MakeError;

// Runs `call`, and returns an exception of kj as an error of `file`.
absl::Status Try(const std::string& file, const std::function<void()>& call) {
  const auto exception = kj::runCatchingExceptions([&] { call(); });
  KJ_IF_MAYBE (e, exception) {
    return MakeError(
        ErrorId::kConfig,
        absl::StrCat(file, ": is not PEM that TLS can use: ", e->getDescription().cStr()),
        "docs/guide/multi-node.md shows how certificates are made");
  }
  return absl::OkStatus();
}

absl::Time TimeOf(const ASN1_TIME* time) {
  std::tm fields{};
  return ASN1_TIME_to_tm(time, &fields) == 1 ? absl::FromTimeT(::timegm(&fields))
                                             : absl::InfinitePast();
}

absl::Status CheckDates(const std::string& file, const X509& certificate) {
  const absl::Time now = absl::Now();
  const absl::Time begin = TimeOf(X509_get0_notBefore(&certificate));
  const absl::Time end = TimeOf(X509_get0_notAfter(&certificate));
  if (begin <= now && now <= end) return absl::OkStatus();
  const auto text = [](absl::Time time) {
    return absl::FormatTime("%Y-%m-%d %H:%M:%S UTC", time, absl::UTCTimeZone());
  };
  return MakeError(ErrorId::kConfig,
                   absl::StrCat(file, ": is valid from ", text(begin), " to ", text(end),
                                "; this machine's clock says ", text(now)),
                   begin > now ? "set the clocks of both machines right"
                               : "have a new one signed: docs/guide/multi-node.md");
}

enum class Whose { kOwn, kAuthority };

// Reads a PEM file and checks that its certificates are valid now: all of our own (kj sends them all), the first of an
// authority (kj trusts that one). The peer would refuse an expired one too, but might not be able to say why. kj itself
// refuses a certificate that cannot be parsed.
//
// Errors  E_CONFIG  a certificate has expired or is not valid yet; those of ReadTextFile.
absl::StatusOr<std::string> ReadCertificates(const std::string& file, std::string_view what,
                                             Whose whose) {
  ASSIGN_OR_RETURN(std::string pem, ReadTextFile(file, what));
  const std::unique_ptr<BIO, decltype(&BIO_free)> bio(
      BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())), &BIO_free);
  do {
    const std::unique_ptr<X509, decltype(&X509_free)> certificate(
        PEM_read_bio_X509_AUX(bio.get(), nullptr, nullptr, nullptr), &X509_free);
    if (certificate == nullptr) break;
    RETURN_IF_ERROR(CheckDates(file, *certificate));
  } while (whose == Whose::kOwn);
  ERR_clear_error();  // the error that the file has no more certificates
  return pem;
}

absl::StatusOr<kj::Own<kj::TlsKeypair>> MakeKeypair(const std::string& key,
                                                    const std::string& certificate,
                                                    const std::string& files) {
  kj::Own<kj::TlsKeypair> pair;
  RETURN_IF_ERROR(Try(files, [&] {
    pair = kj::heap<kj::TlsKeypair>(
        kj::TlsKeypair{.privateKey = kj::TlsPrivateKey(kj::StringPtr(key.c_str())),
                       .certificate = kj::TlsCertificate(kj::StringPtr(certificate.c_str()))});
  }));
  return kj::mv(pair);
}

struct ContextFiles {
  std::string names = {};  // for messages
  std::string ca = {};
  std::string certificate = {};
  std::string key = {};
  bool verifies_clients = false;
  kj::Timer* timer = nullptr;
};

absl::StatusOr<kj::Own<kj::TlsContext>> MakeContext(const ContextFiles& files) {
  kj::TlsContext::Options options;
  options.useSystemTrustStore = false;
  options.verifyClients = files.verifies_clients;
  options.minVersion = kj::TlsVersion::TLS_1_2;
  kj::Own<kj::TlsKeypair> pair;
  if (!files.certificate.empty()) {
    ASSIGN_OR_RETURN(pair, MakeKeypair(files.key, files.certificate, files.names));
    options.defaultKeypair = *pair;
  }
  kj::Vector<kj::TlsCertificate> trusted;
  if (!files.ca.empty()) {
    RETURN_IF_ERROR(Try(files.names,
                        [&] { trusted.add(kj::TlsCertificate(kj::StringPtr(files.ca.c_str()))); }));
    options.trustedCertificates = trusted.asPtr();
  }
  if (files.timer != nullptr) {
    options.timer = *files.timer;
    options.acceptTimeout = 5 * kj::SECONDS;
  }
  kj::Own<kj::TlsContext> context;
  RETURN_IF_ERROR(Try(files.names, [&] { context = kj::heap<kj::TlsContext>(kj::mv(options)); }));
  return kj::mv(context);
}

bool Exists(const std::string& path) { return ::access(path.c_str(), F_OK) == 0; }

}  // namespace

absl::StatusOr<kj::Own<kj::TlsContext>> MakeServerTls(const GatewayConfig& config,
                                                      kj::Timer* timer) {
  ContextFiles files{.names = absl::StrCat(config.certificate, ", ", config.key), .timer = timer};
  ASSIGN_OR_RETURN(files.certificate,
                   ReadCertificates(config.certificate, "the certificate", Whose::kOwn));
  ASSIGN_OR_RETURN(files.key, ReadSecretFile(config.key, "the key"));
  if (!config.client_ca.empty()) {
    absl::StrAppend(&files.names, ", ", config.client_ca);
    ASSIGN_OR_RETURN(files.ca, ReadCertificates(config.client_ca, "the authority of clients",
                                                Whose::kAuthority));
    files.verifies_clients = true;
  }
  return MakeContext(files);
}

absl::StatusOr<AgentCredentials> LoadCredentials(const std::string& folder) {
  AgentCredentials credentials;
  ASSIGN_OR_RETURN(credentials.ca,
                   ReadCertificates(folder + "/ca.pem", "who signs gateways", Whose::kAuthority));
  if (Exists(folder + "/cert.pem")) {
    ASSIGN_OR_RETURN(credentials.certificate,
                     ReadCertificates(folder + "/cert.pem", "a certificate", Whose::kOwn));
    ASSIGN_OR_RETURN(credentials.key, ReadSecretFile(folder + "/key.pem", "the key"));
  } else if (Exists(folder + "/token")) {
    ASSIGN_OR_RETURN(const std::string token, ReadSecretFile(folder + "/token", "the token"));
    credentials.token = std::string(absl::StripAsciiWhitespace(token));
  } else {
    return MakeError(ErrorId::kConfig,
                     absl::StrCat(folder, ": has neither cert.pem with key.pem nor token"),
                     "FOREBAY_REMOTE names the folder with what a gateway asks for");
  }
  return credentials;
}

absl::StatusOr<kj::Own<kj::TlsContext>> MakeClientTls(const AgentCredentials& credentials) {
  return MakeContext({.names = "ca.pem, cert.pem, key.pem",
                      .ca = credentials.ca,
                      .certificate = credentials.certificate,
                      .key = credentials.key});
}

}  // namespace forebay::gateway
