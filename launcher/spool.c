/* spool.c: what works without an agent: a durable request to delete, and the last sign of life. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h> /* renameat */
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "launcher.h"

/* Path of `name` in the socket's directory. */
static void beside(const char *socket_path, const char *name, char path[PATH_BYTES])
{
	size_t length = (size_t)(strrchr(socket_path, '/') - socket_path) + 1;

	memcpy(path, socket_path, length);
	strcpy(path + length, name);
}

static int note(struct text *what_failed, const char *call, const char *path)
{
	int number = errno;

	put(what_failed, call);
	put(what_failed, " '");
	put(what_failed, path);
	put(what_failed, "': ");
	put_errno(what_failed, number);
	return -1;
}

static bool sync_directory(const char *path)
{
	int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	bool ok = fd >= 0 && !fsync(fd);

	if (fd >= 0)
		close(fd);
	return ok;
}

/* Make the missing parts of the path; the last one, the spool itself, is root's alone. */
static int make_directories(char *path, struct text *what_failed)
{
	for (char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
		int made;

		*slash = 0;
		made = mkdir(path, 0755);
		*slash = '/';
		if (made && errno != EEXIST)
			return note(what_failed, "make the directories of", path);
	}
	if (!mkdir(path, 0700)) {
		char *slash = strrchr(path, '/');
		bool synced;

		*slash = 0;
		synced = sync_directory(*path ? path : "/");
		*slash = '/';
		if (!synced)
			return note(what_failed, "make durable", path);
	} else if (errno != EEXIST) {
		return note(what_failed, "make", path);
	}
	return 0;
}

/* A record gets its name when it is whole, so who is killed before that leaves nothing. -1 also where the
 * file system knows no nameless files, or /proc is not mounted.
 */
static int write_nameless(int directory, const char *name, const struct frame *frame)
{
	static struct text itself;
	int fd = openat(directory, ".", O_WRONLY | O_TMPFILE | O_CLOEXEC, 0600);
	bool ok;

	if (fd < 0)
		return -1;
	put(&itself, "/proc/self/fd/");
	put_number(&itself, (unsigned long long)fd, 1);
	ok = write_all(fd, frame->data, frame->length) && !fsync(fd) &&
	     !linkat(AT_FDCWD, itself.data, directory, name, AT_SYMLINK_FOLLOW);
	close(fd);
	return ok ? 0 : -1;
}

/* The same by way of a temporary name; the agent removes it when this process dies meanwhile. */
static int write_renamed(int directory, const char *name, const struct frame *frame)
{
	static struct text temporary;
	int fd, saved_errno;
	bool ok;

	put(&temporary, ".");
	put(&temporary, name);
	put(&temporary, ".tmp");
	fd = openat(directory, temporary.data, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW,
		    0600);
	if (fd < 0)
		return -1;
	ok = write_all(fd, frame->data, frame->length) && !fsync(fd);
	saved_errno = errno;
	close(fd);
	errno = saved_errno;
	if (ok && !renameat(directory, temporary.data, directory, name))
		return 0;
	saved_errno = errno;
	unlinkat(directory, temporary.data, 0);
	errno = saved_errno;
	return -1;
}

/* Leave the request where the agent finds it, durable on return. -1: `what_failed` says why not. */
int spool_request(const char *socket_path, struct frame *frame, struct text *what_failed)
{
	static struct text name;
	char path[PATH_BYTES];
	int directory;

	beside(socket_path, SPOOL_DIRECTORY, path);
	if (make_directories(path, what_failed))
		return -1;
	directory = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	if (directory < 0)
		return note(what_failed, "open", path);
	put_number(&name, frame->started_ns, 20);
	put(&name, "-");
	put_number(&name, (unsigned long long)getpid(), 1);
	put(&name, ".del");
	write_header(frame, false);
	if ((write_nameless(directory, name.data, frame) &&
	     write_renamed(directory, name.data, frame)) ||
	    fsync(directory))
		return note(what_failed, "write a record into", path);
	close(directory);
	return 0;
}

/* Whether the file is `<our boot id> <time still to come>`. */
bool agent_was_alive(const char *socket_path, const char *boot_id)
{
	char path[PATH_BYTES], line[128] = "", expected[80];
	unsigned long long until_ms = 0;
	ssize_t length;
	char *at;
	int fd;

	beside(socket_path, ALIVE_FILE, path);
	fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
	if (fd < 0)
		return false;
	length = read(fd, line, sizeof(line) - 1);
	close(fd);
	stpcpy(stpcpy(expected, boot_id), " ");
	if (length <= 0 || !*boot_id || strncmp(line, expected, strlen(expected)))
		return false;
	at = line + strlen(expected);
	if (*at < '0' || *at > '9')
		return false;
	while (*at >= '0' && *at <= '9' && until_ms < 1ull << 59)
		until_ms = until_ms * 10 + (unsigned long long)(*at++ - '0');
	if (*at == '\n')
		at++;
	return at == line + length && boottime_ns() / 1000000 <= until_ms;
}
