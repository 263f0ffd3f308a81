/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* icmp_tuple.h: how ICMP, which has no ports, is made to fit a tuple. */
#ifndef PODWIRE_ICMP_TUPLE_H
#define PODWIRE_ICMP_TUPLE_H

#include <linux/in.h>
#include <linux/in6.h>

#include <podwire/flow.h>
#include <podwire/icmp.h>

static __always_inline bool is_icmp_error(__u8 protocol, __u8 type)
{
	if (protocol == IPPROTO_ICMPV6)
		return type < PW_ICMPV6_ECHO_REQUEST;
	return type == PW_ICMPV4_UNREACHABLE || type == PW_ICMPV4_SOURCE_QUENCH ||
	       type == PW_ICMPV4_REDIRECT || type == PW_ICMPV4_TIME_EXCEEDED ||
	       type == PW_ICMPV4_PARAMETER_PROBLEM;
}

static __always_inline __u8 echo_request_type(__u8 protocol)
{
	return protocol == IPPROTO_ICMPV6 ? PW_ICMPV6_ECHO_REQUEST : PW_ICMPV4_ECHO_REQUEST;
}

static __always_inline __u8 echo_reply_type(__u8 protocol)
{
	return protocol == IPPROTO_ICMPV6 ? PW_ICMPV6_ECHO_REPLY : PW_ICMPV4_ECHO_REPLY;
}

/* Gives the enum pw_packet_flags of an ICMP type. */
static __always_inline __u16 icmp_flags(__u8 protocol, __u8 type)
{
	if (type == echo_request_type(protocol))
		return PW_PACKET_ECHO_REQUEST;
	if (type == echo_reply_type(protocol))
		return PW_PACKET_ECHO_REPLY;
	return is_icmp_error(protocol, type) ? PW_PACKET_ICMP_ERROR : 0;
}

/* The echo's identifier is the port on the asker's side; type and code of the asking are the port on the other. Both
 * ways of an echo then have one tuple, and a policy judges its destination port, as it does everywhere.
 */
static __always_inline void set_icmp_ports(struct pw_conntrack_key *key,
					   const struct pw_icmp_header *icmp)
{
	key->sport_be = 0;
	key->dport_be = bpf_htons(icmp->type << 8 | icmp->code);
	if (icmp->type == echo_request_type(key->protocol)) {
		key->sport_be = icmp->echo.id_be;
	} else if (icmp->type == echo_reply_type(key->protocol)) {
		key->sport_be = bpf_htons(echo_request_type(key->protocol) << 8 | icmp->code);
		key->dport_be = icmp->echo.id_be;
	}
}

#endif
