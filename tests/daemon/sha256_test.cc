// SPDX-License-Identifier: Apache-2.0
// Goal    The digests equal those of the standards.
// Method  The standards' examples, and messages of about one block of 64 bytes. HMAC has keys of up to one block.

#include "daemon/exec/sha256.h"

#include <cstddef>
#include <span>
#include <string>

#include "absl/strings/escaping.h"
#include "gtest/gtest.h"

namespace forebay::daemon::sha256_test {
namespace {

std::string Hex(const Sha256Digest& digest) {
  return absl::BytesToHexString({reinterpret_cast<const char*>(digest.data()), digest.size()});
}

std::string HashOf(const std::string& text) { return Hex(Sha256(std::as_bytes(std::span(text)))); }

std::string HmacOf(const std::string& key, const std::string& text) {
  return Hex(HmacSha256(std::as_bytes(std::span(key)), std::as_bytes(std::span(text))));
}

// FIPS 180-4's examples, and lengths at which the padding takes one block more.
TEST(Sha256, IsTheStandards) {
  EXPECT_EQ(HashOf(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(HashOf("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(HashOf("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(HashOf(std::string(55, 'a')),
            "9f4390f8d30c2dd92ec9f095b65e2b9ae9b0a925a5258e241c9f1e910f734318");
  EXPECT_EQ(HashOf(std::string(56, 'a')),
            "b35439a4ac6f0948b6d6f9e3c6af0f5f590ce20f1bde7090ef7970686ec6738a");
  EXPECT_EQ(HashOf(std::string(63, 'a')),
            "7d3e74a05d7db15bce4ad9ec0658ea98e3f06eeecf16b4c6fff2da457ddc2f34");
  EXPECT_EQ(HashOf(std::string(64, 'a')),
            "ffe054fe7ae0cb6dc65c3af9b61d5209f439851db43d0ba5997337df154668eb");
  EXPECT_EQ(HashOf(std::string(65, 'a')),
            "635361c48bb9eab14198e76ea8ab7f1a41685d6ad62aa9146d301d4f17eb0ae0");
  EXPECT_EQ(HashOf(std::string(119, 'a')),
            "31eba51c313a5c08226adf18d4a359cfdfd8d2e816b13f4af952f7ea6584dcfb");
  EXPECT_EQ(HashOf(std::string(120, 'a')),
            "2f3d335432c70b580af0e8e1b3674a7c020d683aa5f73aaaedfdc55af904c21c");
  EXPECT_EQ(HashOf(std::string(1000, 'a')),
            "41edece42d63e8d9bf515a9ba6932e1c20cbc9f5a5d134645adb5db1b9737ea3");
}

// RFC 4231, test cases 1 and 2.
TEST(HmacSha256, IsTheStandards) {
  EXPECT_EQ(HmacOf(std::string(20, '\x0b'), "Hi There"),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(HmacOf("Jefe", "what do ya want for nothing?"),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(HmacOf(std::string(64, 'k'), ""),
            "83026a325aaee70e36cfe607536aa1054104ad1077c36134810d4ccded1ccd3b");
}

}  // namespace
}  // namespace forebay::daemon::sha256_test
