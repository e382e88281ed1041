/* The JSON reader's kinds of value, and documents: what is read is what was there, and what is not JSON is refused. */
#include <math.h>

#include "common/document.h"
#include "io/json.h"
#include "test.h"

static hstep_json open_text(char *copy, const char *text)
{
    strcpy(copy, text);
    return (hstep_json){copy, strlen(text), 0, NULL};
}

static int passes(const char *text)
{
    char copy[4096];
    hstep_json json = open_text(copy, text);
    return hstep_json_skip(&json) && hstep_json_end(&json);
}

/* Returns the text, read as a document's member "x" and written again. NULL if it is refused. */
static char *again(const char *text, hstep_buffer *out)
{
    char copy[4096], why[200] = "";
    struct document d;
    strcpy(copy, text);
    document_begin(&d);
    if (put_json(&d, d.root, "x", copy, strlen(text), why, sizeof why) != 0) {
        CHECK(strncmp(why, "byte ", 5) == 0, "%s: %s", text, why);
        document_free(&d);
        return NULL;
    }
    document_write(&d, out);
    CHECK(!out->failed, "%s: not written", text);
    return out->data;
}

int main(int argc, char **argv)
{
    static const char *const good[] = {
        "{}",
        "[]",
        " [ ] ",
        "0",
        "-0",
        "12",
        "-1.5e+3",
        "1E-7",
        "\"\"",
        "\"a\\u00e9\\n\"",
        "true",
        "false",
        "null",
        "\"\\\"\\\\\\/\\b\\f\\r\\t\"",
        "\"\\u00E9\\uAbCd\\ud83D\\uDE00\"",
        "[1, [2, {\"a\": [], \"b\": {}}], \"c\"]",
        "{\"a\": {\"b\": {\"c\": [null, true]}}, \"d\": 1}",
    };
    static const char *const bad[] = {
        "",
        "{",
        "[",
        "[1",
        "[1,",
        "[1,]",
        "[,1]",
        "{\"a\"}",
        "{\"a\":}",
        "{\"a\": 1,}",
        "{1: 2}",
        "{\"a\": 1 \"b\": 2}",
        "]",
        "}",
        "[1}",
        "{\"a\": 1]",
        "01",
        "1.",
        ".5",
        "+1",
        "1e",
        "1e+",
        "--1",
        "1e999",
        "-",
        "tru",
        "nul",
        "True",
        "NaN",
        "Infinity",
        "'a'",
        "\"a",
        "\"\\x\"",
        "\"\\u12\"",
        "\"\\u12",
        "\"\\u12g4\"",
        "\"\\u0000\"",
        "\"\\",
        "\"\\\x01\"",
        "\"\\ud800\"",
        "\"\\ud800xxxxxx\"",
        "\"\\ud800\\nxxxx\"",
        "\"\\ud800\\u0041\"",
        "\"\\ud800\\uxyzw\"",
        "\"\\udc00\\ud800\"",
        "\"\\ud800\\ue000\"",
        "\"\xff\"",
        "\"\t\"",
        "1 2",
        "[] []",
        "{} x",
        "\"a\" \"b\"",
    };
    test_init(argc, argv);

    TEST("values are passed over whole, and nothing else is") {
        for (size_t i = 0; i < COUNT(good); i++) CHECK(passes(good[i]), "refused: %s", good[i]);
        for (size_t i = 0; i < COUNT(bad); i++) CHECK(!passes(bad[i]), "passed: %s", bad[i]);
        for (int depth = HSTEP_JSON_DEPTH; depth <= HSTEP_JSON_DEPTH + 1; depth++) {
            char nested[4096] = "";
            for (int i = 0; i < depth; i++) strcat(nested, i % 2 ? "{\"a\":" : "[");
            strcat(nested, "1");
            for (int i = depth; i-- > 0;) strcat(nested, i % 2 ? "}" : "]");
            CHECK(passes(nested) == (depth == HSTEP_JSON_DEPTH), "%d levels", depth);
        }
    }

    TEST("what was wrong first is kept, and stops everything after it") {
        char copy[] = "]\"a\"1true,";
        const char *string = NULL;
        uint64_t whole = 5;
        double real = 5;
        hstep_json json = {copy, strlen(copy), 0, NULL};
        CHECK(!hstep_json_take(&json, '[') && !json.problem, "a question is no failure");
        CHECK(!hstep_json_expect(&json, '[') && json.problem && strstr(json.problem, "'['"), "%s", json.problem);
        CHECK(!hstep_json_fail(&json, "another") && strstr(json.problem, "'['"), "%s", json.problem);
        CHECK(!hstep_json_take(&json, ']') && !hstep_json_string(&json, &string) && !hstep_json_number(&json, &whole) &&
                  !hstep_json_real(&json, &real) && !hstep_json_word(&json, "true") && !hstep_json_skip(&json) &&
                  !hstep_json_end(&json),
              "something was read after a failure");
        CHECK(json.at == 0 && !string && whole == 5 && real == 5 && strstr(json.problem, "'['"), "at %zu: %s", json.at,
              json.problem);
    }

    TEST("numbers come back with every bit") {
        uint64_t state = 1;
        for (int i = 0; i < 2000; i++) {
            char text[64], copy[64];
            double value, found = 0;
            state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
            memcpy(&value, &state, sizeof value);
            if (!isfinite(value)) continue;
            snprintf(text, sizeof text, "%.17g", value);
            hstep_json json = open_text(copy, text);
            CHECK(hstep_json_real(&json, &found) && hstep_json_end(&json) && found == value, "%s is read as %.17g",
                  text, found);
        }
    }

    TEST("a document takes any JSON and gives it again") {
        for (size_t i = 0; i < COUNT(good); i++) {
            hstep_buffer first = {0}, second = {0};
            CHECK(again(good[i], &first) != NULL, "refused: %s", good[i]);
            CHECK(first.data && again(first.data, &second) && passes(second.data), "%s: not read again", good[i]);
            text_free(&first);
            text_free(&second);
        }
        for (size_t i = 0; i < COUNT(bad); i++) {
            hstep_buffer text = {0};
            CHECK(again(bad[i], &text) == NULL, "taken: %s", bad[i]);
            text_free(&text);
        }
        hstep_buffer text = {0};
        CHECK(again("{\"a\": 1, \"a\": 2}", &text) == NULL, "a name twice");
        /* Characters that a terminal does not show, of one unit of UTF-16 or of two, stay escaped. */
        const char *hidden = "\"\\u200B\\uFFF9\\uDB40\\uDC01\\uDB40\\uDC7F\"";
        CHECK(again(hidden, &text) && strstr(text.data, hidden), "%s is written as %s", hidden, text_string(&text));
        text_free(&text);
        CHECK(again("[9007199254740992, -3, 0.5, 1e3]", &text) && strstr(text.data, "9007199254740992") &&
                  strstr(text.data, "-3"),
              "integers: %s", text_string(&text));
        text_free(&text);
    }

    TEST("a failure is kept, and nothing is written") {
        struct document d, part;
        hstep_buffer text = {0};
        document_begin(&d);
        put_text(&d, NULL, "lost", "x");
        put_text(&d, d.root, "there", "x");
        document_write(&d, &text);
        CHECK(text.failed && !d.root, "written: %s", text_string(&text));
        text_free(&text);
        document_begin(&part);
        part.failed = 1;
        document_begin(&d);
        put_document(&d, d.root, "part", &part);
        CHECK(d.failed, "the failure of a part was not taken over");
        document_free(&part);
        document_free(&d);
        document_begin(&d);
        put_number(&d, d.root, "nan", NAN);
        put_text(&d, d.root, "bytes",
                 "a\xff"
                 "b\xc3\xa9");
        document_write(&d, &text);
        CHECK(!text.failed && strstr(text.data, "\"nan\": null") &&
                  strstr(text.data, "a\xef\xbf\xbd"
                                    "b\xc3\xa9"),
              "%s", text_string(&text));
        text_free(&text);
        hstep_append_json(&text, "\"\\\n\x01\xff\xe2\x82\xac");
        CHECK(strcmp(text_string(&text), "\"\\\"\\\\\\u000a\\u0001\xef\xbf\xbd\xe2\x82\xac\"") == 0, "%s",
              text_string(&text));
        text_free(&text);
    }
    return test_done();
}
