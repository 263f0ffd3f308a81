/* frame.c: collects environment, descriptors and stdin into one frame (docs/protocol.md). */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "launcher.h"

extern char **environ;

static uint64_t clock_ns(clockid_t clock)
{
	struct timespec now;

	clock_gettime(clock, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

uint64_t boottime_ns(void)
{
	return clock_ns(CLOCK_BOOTTIME);
}

int64_t monotonic_ms(void)
{
	return (int64_t)(clock_ns(CLOCK_MONOTONIC) / 1000000);
}

static void store16(unsigned char *at, unsigned int value)
{
	at[0] = (unsigned char)value;
	at[1] = (unsigned char)(value >> 8);
}

static void store32(unsigned char *at, uint32_t value)
{
	store16(at, value);
	store16(at + 2, value >> 16);
}

static void store64(unsigned char *at, uint64_t value)
{
	store32(at, (uint32_t)value);
	store32(at + 4, (uint32_t)(value >> 32));
}

static void put_item(struct frame *frame, unsigned int type, const void *value, size_t length)
{
	unsigned char *at = frame->data + frame->length;

	if (frame->length + 8 + length > FRAME_MAX_BYTES) {
		frame->environment_fits = false;
		return;
	}
	store16(at, type);
	store16(at + 2, 0);
	store32(at + 4, (uint32_t)length);
	memcpy(at + 8, value, length);
	frame->length += 8 + length;
}

static void put_boot_id(struct frame *frame)
{
	int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
	ssize_t length = fd < 0 ? 0 : read(fd, frame->boot_id, sizeof(frame->boot_id) - 1);

	if (fd >= 0)
		close(fd);
	frame->boot_id[length > 0 ? length : 0] = 0;
	frame->boot_id[strcspn(frame->boot_id, "\n")] = 0;
	put_item(frame, ITEM_BOOT_ID, frame->boot_id, strlen(frame->boot_id));
}

static void put_environment(struct frame *frame)
{
	for (char **variable = environ; *variable; variable++)
		if (!strncmp(*variable, "CNI_", 4) && strchr(*variable, '='))
			put_item(frame, ITEM_ENVIRONMENT, *variable, strlen(*variable));
}

static unsigned int open_netns(struct frame *frame)
{
	const char *path = getenv("CNI_NETNS");
	unsigned char number[4];
	int fd;

	if (!path || !*path)
		return 0;
	/* O_NONBLOCK: the path may be anything, also a FIFO that nobody writes to. */
	fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
	if (fd >= 0) {
		frame->fds[frame->fd_count++] = fd;
		return FLAG_NETNS;
	}
	store32(number, (uint32_t)errno);
	put_item(frame, ITEM_NETNS_ERRNO, number, sizeof(number));
	return 0;
}

static unsigned int open_mntns(struct frame *frame)
{
	int fd = open("/proc/self/ns/mnt", O_RDONLY | O_CLOEXEC);

	if (fd < 0)
		return 0;
	frame->fds[frame->fd_count++] = fd;
	return FLAG_MNTNS;
}

/* Read all of stdin to where the last item's value is going to be. */
static void read_input(struct frame *frame)
{
	unsigned char *input = frame->data + frame->length + 8;

	frame->input = input;
	while (frame->input_length <= STDIN_MAX_BYTES) {
		ssize_t count = read(STDIN_FILENO, input + frame->input_length,
				     STDIN_MAX_BYTES + 1 - frame->input_length);

		if (count < 0 && errno == EINTR)
			continue;
		if (count < 0)
			frame->input_errno = errno;
		if (count <= 0)
			break;
		frame->input_length += (size_t)count;
	}
}

void collect_frame(struct frame *frame, const char *program, bool is_add, uint64_t started_ns)
{
	const char *slash = strrchr(program, '/');

	program = slash ? slash + 1 : program;
	frame->length = REQUEST_HEADER_BYTES;
	frame->started_ns = started_ns;
	frame->environment_fits = true;
	put_item(frame, ITEM_PROGRAM, program, strlen(program));
	/* An ADD is never written down for later, and calls no other plugin: each of these two costs it 20 us. */
	if (is_add)
		put_item(frame, ITEM_BOOT_ID, "", 0);
	else
		put_boot_id(frame);
	put_item(frame, ITEM_LAUNCHER_VERSION, PODWIRE_VERSION, strlen(PODWIRE_VERSION));
	frame->descriptor_flags = open_netns(frame);
	if (!is_add)
		frame->descriptor_flags |= open_mntns(frame);
	put_environment(frame);
	read_input(frame);
}

/* A record in the spool says that no descriptors come with it. */
void write_header(struct frame *frame, bool with_descriptors)
{
	memcpy(frame->data, "PWRQ", 4);
	frame->data[4] = MAJOR;
	frame->data[5] = MINOR;
	store16(frame->data + 6, with_descriptors ? frame->descriptor_flags : 0);
	store32(frame->data + 8, (uint32_t)frame->length);
	store32(frame->data + 12, 0);
	store64(frame->data + 16, frame->started_ns);
}

/* Put what was read on stdin into the last item. */
void close_frame(struct frame *frame)
{
	unsigned char *at = frame->data + frame->length;

	store16(at, ITEM_STDIN);
	store16(at + 2, 0);
	store32(at + 4, (uint32_t)frame->input_length);
	frame->length += 8 + frame->input_length;
	write_header(frame, true);
}
