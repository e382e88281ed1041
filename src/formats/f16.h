/* IEEE half, for gradients: 2 bytes an element, to nearest even. Beyond 65504 it overflows to infinity, which the scan of
 * the next step finds; nothing is hidden by saturation. */
#ifndef HSTEP_F16_H
#define HSTEP_F16_H

V_OP void f16_decode(const char *code, const char *extra, int64_t i, vf *e, vf *o)
{
    (void)extra;
    vp_load_f16(code + 2 * i, e, o);
}

V_OP void f16_encode(char *code, char *extra, int64_t i, vf e, vf o, vi words, const int state)
{
    (void)extra, (void)words, (void)state;
    vp_store_f16(code + 2 * i, e, o);
}

V_OP void f16_apply(char *code, char *extra, int64_t i, vf we, vf wo, vf de, vf d_o, vi words)
{
    f16_encode(code, extra, i, v_sub(we, de), v_sub(wo, d_o), words, 0);
}

#endif
