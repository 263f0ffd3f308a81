/* config.c: finds "socket", "agent-wait" and "cniVersion" at the top level of the configuration.
 *
 * A checker of JSON's grammar (RFC 8259) that remembers where three values are; no tree, no
 * allocation, no recursion. What the rest means is the agent's business. A key that comes twice:
 * the last one counts.
 */
#include <string.h>

#include "launcher.h"

enum kind { MISSING, STRING, NUMBER, OTHER };
enum expect { VALUE, FIRST_KEY, KEY, FIRST_ELEMENT, AFTER_VALUE };

struct value {
	enum kind kind;
	const unsigned char *start; /* of a string: behind its quote */
	const unsigned char *end;
};

struct scan {
	const unsigned char *at;
	const unsigned char *end;
	enum expect expect;
	size_t depth;
	struct value *wanted; /* where the next value goes when it is one of ours */
	struct value socket;
	struct value agent_wait;
	struct value cni_version;
	/* One bit for each open bracket: 1 = object. As deep as an input of brackets only. */
	unsigned char is_object[STDIN_MAX_BYTES / 8 + 1];
};

static bool at_digit(const struct scan *scan)
{
	return scan->at < scan->end && *scan->at >= '0' && *scan->at <= '9';
}

static bool skip_digits(struct scan *scan)
{
	if (!at_digit(scan))
		return false;
	while (at_digit(scan))
		scan->at++;
	return true;
}

static bool skip_char(struct scan *scan, char wanted)
{
	if (scan->at == scan->end || *scan->at != (unsigned char)wanted)
		return false;
	scan->at++;
	return true;
}

static bool skip_number(struct scan *scan)
{
	skip_char(scan, '-');
	if (!skip_char(scan, '0') && !skip_digits(scan))
		return false;
	if (skip_char(scan, '.') && !skip_digits(scan))
		return false;
	if (skip_char(scan, 'e') || skip_char(scan, 'E')) {
		if (!skip_char(scan, '+'))
			skip_char(scan, '-');
		return skip_digits(scan);
	}
	return true;
}

static bool skip_word(struct scan *scan, const char *word)
{
	size_t length = strlen(word);

	if ((size_t)(scan->end - scan->at) < length || memcmp(scan->at, word, length))
		return false;
	scan->at += length;
	return true;
}

static int hex_digit(unsigned char character)
{
	if (character >= '0' && character <= '9')
		return character - '0';
	character |= 0x20;
	return character >= 'a' && character <= 'f' ? character - 'a' + 10 : -1;
}

static bool skip_escape(struct scan *scan)
{
	if (scan->at == scan->end)
		return false;
	if (*scan->at == 'u') {
		if (scan->end - scan->at < 5)
			return false;
		for (int i = 1; i <= 4; i++)
			if (hex_digit(scan->at[i]) < 0)
				return false;
		scan->at += 5;
		return true;
	}
	return *scan->at && strchr("\"\\/bfnrt", *scan->at++);
}

/* Behind the opening quote; leaves `at` behind the closing one. */
static bool skip_string(struct scan *scan)
{
	while (scan->at < scan->end) {
		unsigned char character = *scan->at++;

		if (character == '"')
			return true;
		if (character < 0x20)
			return false;
		if (character == '\\' && !skip_escape(scan))
			return false;
	}
	return false;
}

static unsigned int read_hex4(const unsigned char *at)
{
	unsigned int unit = 0;

	for (int i = 0; i < 4; i++)
		unit = unit << 4 | (unsigned int)hex_digit(at[i]);
	return unit;
}

static size_t encode_utf8(unsigned int code, unsigned char out[4])
{
	if (code < 0x80) {
		out[0] = (unsigned char)code;
		return 1;
	}
	if (code < 0x800) {
		out[0] = (unsigned char)(0xc0 | code >> 6);
		out[1] = (unsigned char)(0x80 | (code & 0x3f));
		return 2;
	}
	if (code < 0x10000) {
		out[0] = (unsigned char)(0xe0 | code >> 12);
		out[1] = (unsigned char)(0x80 | (code >> 6 & 0x3f));
		out[2] = (unsigned char)(0x80 | (code & 0x3f));
		return 3;
	}
	out[0] = (unsigned char)(0xf0 | code >> 18);
	out[1] = (unsigned char)(0x80 | (code >> 12 & 0x3f));
	out[2] = (unsigned char)(0x80 | (code >> 6 & 0x3f));
	out[3] = (unsigned char)(0x80 | (code & 0x3f));
	return 4;
}

/* One escape, `at` behind the backslash, as UTF-8; 0 bytes for half of a surrogate pair. */
static size_t decode_escape(const unsigned char **at, const unsigned char *end,
			    unsigned char out[4])
{
	static const char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
	unsigned char name = *(*at)++;
	unsigned int code;

	if (name != 'u') {
		out[0] = (unsigned char)values[strchr(names, name) - names];
		return 1;
	}
	code = read_hex4(*at);
	*at += 4;
	if (code >= 0xd800 && code < 0xdc00 && end - *at >= 6 && (*at)[0] == '\\' &&
	    (*at)[1] == 'u') {
		unsigned int low = read_hex4(*at + 2);

		if (low >= 0xdc00 && low < 0xe000) {
			*at += 6;
			code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
		}
	}
	if (code >= 0xd800 && code < 0xe000)
		return 0;
	return encode_utf8(code, out);
}

/* A checked string without its escapes; false on a NUL, half a surrogate pair, or no room. */
static bool decode_string(const struct value *value, char *out, size_t room)
{
	const unsigned char *at = value->start;
	size_t length = 0;

	while (at < value->end) {
		unsigned char bytes[4] = {*at++};
		size_t count = 1;

		if (bytes[0] == '\\')
			count = decode_escape(&at, value->end, bytes);
		if (!count || !bytes[0] || length + count >= room)
			return false;
		memcpy(out + length, bytes, count);
		length += count;
	}
	out[length] = 0;
	return true;
}

static bool push(struct scan *scan, bool object)
{
	unsigned char bit = (unsigned char)(1 << scan->depth % 8);

	if (object)
		scan->is_object[scan->depth / 8] |= bit;
	else
		scan->is_object[scan->depth / 8] &= (unsigned char)~bit;
	scan->depth++;
	scan->expect = object ? FIRST_KEY : FIRST_ELEMENT;
	return true;
}

static bool in_object(const struct scan *scan)
{
	return scan->is_object[(scan->depth - 1) / 8] >> (scan->depth - 1) % 8 & 1;
}

static bool pop(struct scan *scan)
{
	scan->depth--;
	scan->expect = AFTER_VALUE;
	return true;
}

static bool scan_value(struct scan *scan)
{
	struct value value = {.kind = OTHER, .start = scan->at};
	struct value *wanted = scan->wanted;
	bool ok;

	scan->wanted = NULL;
	scan->expect = AFTER_VALUE;
	if (skip_char(scan, '{')) {
		ok = push(scan, true);
	} else if (skip_char(scan, '[')) {
		ok = push(scan, false);
	} else if (skip_char(scan, '"')) {
		value.kind = STRING;
		value.start++;
		ok = skip_string(scan);
	} else if (skip_word(scan, "true") || skip_word(scan, "false") || skip_word(scan, "null")) {
		ok = true;
	} else {
		value.kind = NUMBER;
		ok = skip_number(scan);
	}
	value.end = value.kind == STRING ? scan->at - 1 : scan->at;
	if (wanted)
		*wanted = value;
	return ok;
}

static void skip_space(struct scan *scan)
{
	while (scan->at < scan->end && *scan->at && strchr(" \t\n\r", *scan->at))
		scan->at++;
}

static bool scan_key(struct scan *scan)
{
	struct value key = {.kind = STRING};
	char name[16];

	if (!skip_char(scan, '"'))
		return false;
	key.start = scan->at;
	if (!skip_string(scan))
		return false;
	key.end = scan->at - 1;
	if (scan->depth == 1 && decode_string(&key, name, sizeof(name))) {
		if (!strcmp(name, "socket"))
			scan->wanted = &scan->socket;
		else if (!strcmp(name, "agent-wait"))
			scan->wanted = &scan->agent_wait;
		else if (!strcmp(name, "cniVersion"))
			scan->wanted = &scan->cni_version;
	}
	skip_space(scan);
	scan->expect = VALUE;
	return skip_char(scan, ':');
}

static bool scan_after_value(struct scan *scan)
{
	bool object = in_object(scan);

	if (skip_char(scan, object ? '}' : ']'))
		return pop(scan);
	scan->expect = object ? KEY : VALUE;
	return skip_char(scan, ',');
}

static bool scan_token(struct scan *scan)
{
	switch (scan->expect) {
	case FIRST_KEY:
		return skip_char(scan, '}') ? pop(scan) : scan_key(scan);
	case KEY:
		return scan_key(scan);
	case FIRST_ELEMENT:
		return skip_char(scan, ']') ? pop(scan) : scan_value(scan);
	case AFTER_VALUE:
		return scan_after_value(scan);
	default:
		return scan_value(scan);
	}
}

static bool scan_document(struct scan *scan)
{
	skip_space(scan);
	if (!skip_char(scan, '{'))
		return false;
	push(scan, true);
	while (scan->depth) {
		skip_space(scan);
		if (scan->at == scan->end || !scan_token(scan))
			return false;
	}
	skip_space(scan);
	return scan->at == scan->end;
}

static bool read_socket(const struct value *value, struct config *config)
{
	if (value->kind == MISSING) {
		strcpy(config->socket, DEFAULT_SOCKET);
		return true;
	}
	return value->kind == STRING &&
	       decode_string(value, config->socket, sizeof(config->socket)) &&
	       config->socket[0] == '/';
}

static bool read_agent_wait(const struct value *value, struct config *config)
{
	long seconds = 0;

	config->agent_wait_s = AGENT_WAIT_DEFAULT_S;
	if (value->kind == MISSING)
		return true;
	if (value->kind != NUMBER)
		return false;
	for (const unsigned char *at = value->start; at < value->end; at++) {
		if (*at < '0' || *at > '9' || seconds > AGENT_WAIT_MAX_S)
			return false;
		seconds = seconds * 10 + (*at - '0');
	}
	config->agent_wait_s = seconds;
	return seconds <= AGENT_WAIT_MAX_S;
}

void read_config(const unsigned char *data, size_t length, struct config *config)
{
	static struct scan scan;

	scan.at = data;
	scan.end = data + length;
	if (!scan_document(&scan)) {
		/* What a broken document seems to ask for counts for nothing: its last string may have no end. */
		scan.cni_version.kind = MISSING;
		config->code = CODE_DECODE;
		config->fault = "read the network configuration: stdin is not one JSON object";
	} else if (!read_socket(&scan.socket, config)) {
		config->code = CODE_CONFIGURATION;
		config->fault = "read the network configuration: \"socket\" is no absolute path of "
				"at most 107 bytes";
	} else if (!read_agent_wait(&scan.agent_wait, config)) {
		config->code = CODE_CONFIGURATION;
		config->fault = "read the network configuration: \"agent-wait\" is no whole number "
				"of 0 to 600";
	}
	if (scan.cni_version.kind != STRING ||
	    !decode_string(&scan.cni_version, config->cni_version, sizeof(config->cni_version)) ||
	    !is_supported_version(config->cni_version))
		strcpy(config->cni_version, "1.1.0");
}
