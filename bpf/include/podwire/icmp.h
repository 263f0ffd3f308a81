/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* icmp.h: numbers and forms of ICMP, ICMPv6 and ARP. The kernel's own headers for them pull in the C library's. */
#ifndef PODWIRE_ICMP_H
#define PODWIRE_ICMP_H

#include <linux/types.h>

/* RFC 792; RFC 1812 5.2.7 for the codes */
enum pw_icmpv4_type {
	PW_ICMPV4_ECHO_REPLY = 0,
	PW_ICMPV4_UNREACHABLE = 3,
	PW_ICMPV4_SOURCE_QUENCH = 4,
	PW_ICMPV4_REDIRECT = 5,
	PW_ICMPV4_ECHO_REQUEST = 8,
	PW_ICMPV4_TIME_EXCEEDED = 11,
	PW_ICMPV4_PARAMETER_PROBLEM = 12,
};

enum pw_icmpv4_code {
	PW_ICMPV4_HOST_UNREACHABLE = 1,
	PW_ICMPV4_PORT_UNREACHABLE = 3,
	PW_ICMPV4_FRAGMENTATION_NEEDED = 4,
};

/* RFC 4443; types below the echo's are errors */
enum pw_icmpv6_type {
	PW_ICMPV6_UNREACHABLE = 1,
	PW_ICMPV6_PACKET_TOO_BIG = 2,
	PW_ICMPV6_TIME_EXCEEDED = 3,
	PW_ICMPV6_ECHO_REQUEST = 128,
	PW_ICMPV6_ECHO_REPLY = 129,
	PW_ICMPV6_ROUTER_SOLICITATION = 133, /* RFC 4861, and the three that follow */
	PW_ICMPV6_NEIGHBOUR_SOLICITATION = 135,
	PW_ICMPV6_NEIGHBOUR_ADVERTISEMENT = 136,
	PW_ICMPV6_REDIRECT = 137,
};

enum pw_icmpv6_code {
	PW_ICMPV6_ADDRESS_UNREACHABLE = 3,
	PW_ICMPV6_PORT_UNREACHABLE = 4,
};

enum pw_arp_number {
	PW_ARP_ETHERNET = 1,
	PW_ARP_REQUEST = 1,
	PW_ARP_REPLY = 2,
};

/* The eight bytes that every message begins with. */
struct pw_icmp_header {
	__u8 type;
	__u8 code;
	__u16 checksum;
	union {
		struct {
			__be16 id_be;
			__be16 sequence_be;
		} echo;
		__be32 mtu_be;
	};
};

struct pw_arp {
	__u8 destination_mac[6];
	__u8 source_mac[6];
	__be16 ethertype_be;
	__be16 hardware_be;
	__be16 protocol_be;
	__u8 hardware_bytes;
	__u8 protocol_bytes;
	__be16 operation_be;
	__u8 sender_mac[6];
	__u8 sender_ip[4];
	__u8 target_mac[6];
	__u8 target_ip[4];
} __attribute__((packed));

/* A neighbour solicitation (without its options) and an advertisement have one form. */
struct pw_neighbour {
	__u8 type;
	__u8 code;
	__u16 checksum;
	__u8 flags;
	__u8 reserved[3];
	__u8 target[16];
};

/* An advertisement with the one option that says which MAC the target has. */
struct pw_advertisement {
	struct pw_neighbour message;
	__u8 option_type;
	__u8 option_words;
	__u8 mac[6];
};

#endif
