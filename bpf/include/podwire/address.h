/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* address.h: compare and copy the 16 bytes of an address. */
#ifndef PODWIRE_ADDRESS_H
#define PODWIRE_ADDRESS_H

#include <stdbool.h>

#include <linux/types.h>

/* Addresses are compared and copied as words: every one in a struct here stands at a multiple of four. */
static __always_inline bool same_address(const void *left, const void *right)
{
	const __u32 *a = left, *b = right;

	return !((a[0] ^ b[0]) | (a[1] ^ b[1]) | (a[2] ^ b[2]) | (a[3] ^ b[3]));
}

static __always_inline void copy_address(void *to, const void *from)
{
	__u32 *a = to;
	const __u32 *b = from;

	a[0] = b[0];
	a[1] = b[1];
	a[2] = b[2];
	a[3] = b[3];
}

#endif
