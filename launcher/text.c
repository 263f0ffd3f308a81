/* text.c: bounded text, JSON for stdout. No stdio: it would double the program's size. */
#define _GNU_SOURCE
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "launcher.h"

static const char *const versions[] = {"0.1.0", "0.2.0", "0.3.0", "0.3.1",
				       "0.4.0", "1.0.0", "1.1.0"};
#define VERSION_COUNT (sizeof(versions) / sizeof(versions[0]))

void put(struct text *text, const char *part)
{
	size_t length = strlen(part);

	if (length > sizeof(text->data) - text->length)
		return;
	memcpy(text->data + text->length, part, length);
	text->length += length;
}

static void put_char(struct text *text, char character)
{
	char part[2] = {character, 0};

	put(text, part);
}

/* Decimal, with leading zeroes up to `width` digits. */
void put_number(struct text *text, unsigned long long number, int width)
{
	char digits[24];
	size_t at = sizeof(digits) - 1;

	digits[at] = 0;
	do {
		digits[--at] = (char)('0' + number % 10);
		number /= 10;
		width--;
	} while (number || width > 0);
	put(text, digits + at);
}

void put_errno(struct text *text, int number)
{
	const char *description = strerror(number);

	put(text, description ? description : "unknown error");
	put(text, " (errno ");
	put_number(text, (unsigned long long)number, 1);
	put(text, ")");
}

bool write_all(int fd, const void *data, size_t length)
{
	const char *at = data;

	while (length) {
		ssize_t written = write(fd, at, length);

		if (written < 0 && errno == EINTR)
			continue;
		if (written <= 0)
			return false;
		at += written;
		length -= (size_t)written;
	}
	return true;
}

/* A JSON string. Bytes that are not ASCII become '?': they may be no UTF-8, and JSON must be. */
void put_json_string(struct text *text, const char *data, size_t length)
{
	put(text, "\"");
	for (size_t i = 0; i < length; i++) {
		unsigned char character = (unsigned char)data[i];

		if (text->length > sizeof(text->data) - 512)
			break;
		if (character == '"' || character == '\\')
			put_char(text, '\\');
		put_char(text, character < 0x20 || character > 0x7e ? '?' : (char)character);
	}
	put(text, "\"");
}

bool is_supported_version(const char *version)
{
	for (size_t i = 0; i < VERSION_COUNT; i++)
		if (!strcmp(version, versions[i]))
			return true;
	return false;
}

/* Print the error as the specification wants it; the process's exit status. */
int fail(const char *cni_version, int code, const struct text *message, const char *hint)
{
	static struct text json;

	put(&json, "{\"cniVersion\":\"");
	put(&json, cni_version);
	put(&json, "\",\"code\":");
	put_number(&json, (unsigned long long)code, 1);
	put(&json, ",\"msg\":");
	put_json_string(&json, message->data, message->length);
	put(&json, ",\"details\":");
	put_json_string(&json, hint, strlen(hint));
	put(&json, "}\n");
	write_all(STDOUT_FILENO, json.data, json.length);
	return 1;
}

int fail_plain(const char *cni_version, int code, const char *message, const char *hint)
{
	static struct text text;

	put(&text, message);
	return fail(cni_version, code, &text, hint);
}

int answer_version(const char *cni_version)
{
	static struct text json;

	put(&json, "{\"cniVersion\":\"");
	put(&json, cni_version);
	put(&json, "\",\"supportedVersions\":[");
	for (size_t i = 0; i < VERSION_COUNT; i++) {
		put(&json, i ? ",\"" : "\"");
		put(&json, versions[i]);
		put(&json, "\"");
	}
	put(&json, "]}\n");
	return write_all(STDOUT_FILENO, json.data, json.length) ? 0 : 1;
}
