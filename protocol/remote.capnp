# SPDX-License-Identifier: Apache-2.0
@0xb7c3a5d21e9f4c60;
# The control plane between an agent, which serves a trainer on another node, and a gateway: over TLS. No descriptor
# travels here; what the rings and arenas hold goes over UCX (protocol/remote_wire.h).

using Cxx = import "/capnp/c++.capnp";
using Forebay = import "forebay.capnp";
$Cxx.namespace("forebay::schema");

interface Gateway {
  hello @0 (protocolVersion :UInt32, remoteVersion :UInt32, token :Text) -> (outcome :Forebay.Outcome, node :RemoteNode, keepaliveMs :UInt32, remoteReads :Bool);
  # First call of every connection. Another version is refused with E_PROTOCOL that names both. `token`: where the
  # gateway knows principals by tokens and not by certificates. `remoteReads`: the agent may have to read weights itself.
}

interface RemoteNode {
  # The daemon behind the gateway, for one principal.

  ping @0 () -> ();
  # At least once within the keepalive, else the gateway ends the connection and its sessions.

  layout @1 (bytes :Data) -> (outcome :Forebay.Outcome);
  # The next piece of an encoded LayoutSpec, at most 256 KiB. The next attach uses what has come.

  attach @2 (request :Forebay.AttachRequest, worker :Data) -> (outcome :Forebay.Outcome, session :Forebay.Session, reply :Forebay.AttachReply, terms :RemoteTerms);
  # Attaches like Node.attach. `worker`: the address of the agent's UCX worker. descriptor() of the session is refused.

  admin @3 () -> (outcome :Forebay.Outcome, admin :Forebay.Admin);
}

struct RemoteTerms {
  session @0 :UInt64;
  secret @1 :Data;          # 16 bytes, of every message of the session over UCX
  worker @2 :Data;          # the address of the gateway's UCX worker
  weightsKey @3 :Data;      # for remote reads of the weights; empty: they come in messages
  weightsAddress @4 :UInt64;
  extraState @5 :Data;      # of this rank, then rank 0's
}
