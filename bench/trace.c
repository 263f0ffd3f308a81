/* trace.c: run one command and print when it was spawned and when it had ended.
 *
 * Usage: trace STDIN-FILE STDOUT-FILE GATE COMMAND...; "BEGIN END STATUS" goes to stdout, the times in
 * nanoseconds of CLOCK_MONOTONIC. GATE is "-", or a FIFO: then the command is spawned when somebody opens it
 * for writing, so that many tracers begin together. A process this small adds as little as possible around
 * what it measures.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>

extern char **environ;

static long long now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000000LL + now.tv_nsec;
}

int main(int argc, char **argv)
{
	posix_spawn_file_actions_t actions;
	long long begin, end;
	int status;
	pid_t pid;

	if (argc < 5)
		return 2;
	if (strcmp(argv[3], "-") != 0 && open(argv[3], O_RDONLY) < 0)
		return 5;
	posix_spawn_file_actions_init(&actions);
	posix_spawn_file_actions_addopen(&actions, 0, argv[1], O_RDONLY, 0);
	posix_spawn_file_actions_addopen(&actions, 1, argv[2], O_WRONLY | O_CREAT | O_TRUNC, 0600);
	begin = now_ns();
	if (posix_spawn(&pid, argv[4], &actions, NULL, argv + 4, environ))
		return 3;
	if (waitpid(pid, &status, 0) != pid)
		return 4;
	end = now_ns();
	printf("%lld %lld %d\n", begin, end, WIFEXITED(status) ? WEXITSTATUS(status) : 128);
	return 0;
}
