/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* gateway_address.h: 169.254.1.1 and fe80::1, the same for every pod; the programs are the gateway (rule 18). */
#ifndef PODWIRE_GATEWAY_ADDRESS_H
#define PODWIRE_GATEWAY_ADDRESS_H

#include <podwire/flow.h>

#define PW_GATEWAY_IPV4	     0xa9fe0101 /* 169.254.1.1 */
#define PW_LINK_LOCAL_PREFIX 0xfe800000 /* the first 32 bits of fe80::/64 */

static __always_inline bool is_gateway_ipv6(const void *address)
{
	const __u32 *words = address;

	return words[0] == bpf_htonl(PW_LINK_LOCAL_PREFIX) && !words[1] && !words[2] &&
	       words[3] == bpf_htonl(1);
}

static __always_inline bool is_gateway(const void *address)
{
	if (is_mapped_ipv4(address))
		return mapped_ipv4(address) == bpf_htonl(PW_GATEWAY_IPV4);
	return is_gateway_ipv6(address);
}

static __always_inline void set_gateway_ipv6(void *address)
{
	__u32 *words = address;

	words[0] = bpf_htonl(PW_LINK_LOCAL_PREFIX);
	words[1] = 0;
	words[2] = 0;
	words[3] = bpf_htonl(1);
}

static __always_inline bool is_link_local_ipv6(const void *address)
{
	return (((const __u32 *)address)[0] & bpf_htonl(0xffc00000)) ==
	       bpf_htonl(PW_LINK_LOCAL_PREFIX);
}

#endif
