/* Tests the two files that docs/adding.md tells people to copy. They compile against the vocabulary and work. */
#include "vec/scalar.h"

#include "../examples/skeleton_format.h"
#undef skeleton_ROW /* both have one, and are not meant to meet */
#include "../examples/skeleton_rule.h"

#include "test.h"

int main(int argc, char **argv)
{
    test_init(argc, argv);

    TEST("skeleton rule") {
        const double hyper[] = {0.75};
        struct hstep_prepare p = {.hyper = hyper, .lr = 0.5, .decay = 0.25, .t = 1};
        float k[HSTEP_MAX_SCALARS] = {0}, state = -1.0f;
        skeleton_prepare(k, &p);
        float d = skeleton_rule(k, 2.0f, 1.0f, &state, 0);
        EQUAL(state, -0.5f);
        EQUAL(d, -0.5f + 0.5f);
        state = 0.0f;
        d = skeleton_rule(k, 0.0f, 0.0f, &state, 0);
        CHECK(d == 0.0f && state == 0.0f, "zeros must stay zeros: change %g, state %g", d, state);
    }

    TEST("skeleton format") {
        for (int nonneg = 0; nonneg < 2; nonneg++)
            for (float maximum = 0x1p-100f; maximum < 0x1p100f; maximum *= 1.7f) {
                vi scale = skeleton_scale(maximum, nonneg);
                float step = v_from_bits(scale);
                CHECK((scale & 0xffff) == 0 && step >= maximum / (nonneg ? 255.0f : 127.0f), "scale %g of maximum %g",
                      step, maximum);
                for (float x = nonneg ? 0.0f : -maximum; x <= maximum; x += maximum / 100.0f) {
                    vi code = skeleton_code(skeleton_stash(x, nonneg), skeleton_inverse(scale, nonneg), 0x8000, nonneg),
                       e, o;
                    char bytes[2];
                    skeleton_store(bytes, 0, code, code);
                    skeleton_load(bytes, 0, &e, &o, nonneg);
                    CHECK(e == code && o == code, "code %d came back as %d and %d", (int)code, (int)e, (int)o);
                    double error = (double)skeleton_value(e, step, nonneg) - (double)x;
                    CHECK(error <= 0.51 * (double)step && error >= -0.51 * (double)step,
                          "x %g, maximum %g: error %g, step %g", x, maximum, error, step);
                }
            }
        CHECK(skeleton_scale(0.0f, 0) == 0 && skeleton_inverse(0, 0) == 0.0f, "an all-zero block needs scale 0");
    }

    return test_done();
}
