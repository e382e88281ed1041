/* The maps of the dynamic block formats dyn8.h and dyn4.h, and how a code is found in them.
 *
 * A map has 0, 1 and D decades j = 0 .. D - 1. A decade is the centres of L equal parts of 0.1 .. 1, times 10^(j - D +
 * 1). L is 2^j (signed, of either sign) or 2^(j+1) (unsigned). The tables hold torchao's own fp32 values. The package
 * cuts the parts with torch.linspace in fp32, halves sums of neighbours and multiplies by the power of ten. All is
 * rounded to fp32, so a closed form differs in the last two bits. The tables serve this rule, in fp32: the largest
 * entry q[c] <= n, then c + 1 if n - q[c] >= (q[c+1] - q[c]) / 2. */
#ifndef HSTEP_DYN_MAP_H
#define HSTEP_DYN_MAP_H

#include "formats/common.h"

V_TABLE float hstep_dyn8_signed[256] = {
    -0x1.fc6666p-1f,  -0x1.f53334p-1f,  -0x1.eep-1f,      -0x1.e6ccccp-1f,  -0x1.df999ap-1f,  -0x1.d86666p-1f,
    -0x1.d13334p-1f,  -0x1.cap-1f,      -0x1.c2ccccp-1f,  -0x1.bb999ap-1f,  -0x1.b46666p-1f,  -0x1.ad3334p-1f,
    -0x1.a6p-1f,      -0x1.9eccccp-1f,  -0x1.97999ap-1f,  -0x1.906666p-1f,  -0x1.893334p-1f,  -0x1.82p-1f,
    -0x1.7accccp-1f,  -0x1.73999ap-1f,  -0x1.6c6668p-1f,  -0x1.653334p-1f,  -0x1.5ep-1f,      -0x1.56ccccp-1f,
    -0x1.4f999ap-1f,  -0x1.486668p-1f,  -0x1.413334p-1f,  -0x1.3ap-1f,      -0x1.32ccccp-1f,  -0x1.2b999ap-1f,
    -0x1.246668p-1f,  -0x1.1d3334p-1f,  -0x1.16p-1f,      -0x1.0eccccp-1f,  -0x1.079998p-1f,  -0x1.006666p-1f,
    -0x1.f26664p-2f,  -0x1.e4p-2f,      -0x1.d59998p-2f,  -0x1.c73334p-2f,  -0x1.b8ccccp-2f,  -0x1.aa6666p-2f,
    -0x1.9cp-2f,      -0x1.8d9998p-2f,  -0x1.7f3334p-2f,  -0x1.70ccccp-2f,  -0x1.626666p-2f,  -0x1.54p-2f,
    -0x1.459998p-2f,  -0x1.373334p-2f,  -0x1.28ccccp-2f,  -0x1.1a6668p-2f,  -0x1.0cp-2f,      -0x1.fb3332p-3f,
    -0x1.de6666p-3f,  -0x1.c1999ap-3f,  -0x1.a4ccccp-3f,  -0x1.88p-3f,      -0x1.6b3334p-3f,  -0x1.4e6666p-3f,
    -0x1.31999ap-3f,  -0x1.14ccccp-3f,  -0x1.fp-4f,       -0x1.b66668p-4f,  -0x1.93d70ap-4f,  -0x1.8851eep-4f,
    -0x1.7ccccep-4f,  -0x1.7147aep-4f,  -0x1.65c29p-4f,   -0x1.5a3d7p-4f,   -0x1.4eb854p-4f,  -0x1.433334p-4f,
    -0x1.37ae14p-4f,  -0x1.2c28f6p-4f,  -0x1.20a3d6p-4f,  -0x1.151ebap-4f,  -0x1.09999ap-4f,  -0x1.fc28f6p-5f,
    -0x1.e51ebap-5f,  -0x1.ce147ap-5f,  -0x1.b70a3ep-5f,  -0x1.ap-5f,       -0x1.88f5c2p-5f,  -0x1.71eb86p-5f,
    -0x1.5ae146p-5f,  -0x1.43d70ap-5f,  -0x1.2ccccep-5f,  -0x1.15c29p-5f,   -0x1.fd70a4p-6f,  -0x1.cf5c2ap-6f,
    -0x1.a147aep-6f,  -0x1.733334p-6f,  -0x1.451ebap-6f,  -0x1.170a3ep-6f,  -0x1.d1eb86p-7f,  -0x1.75c29p-7f,
    -0x1.3e76c8p-7f,  -0x1.2c083p-7f,   -0x1.19999ap-7f,  -0x1.072b02p-7f,  -0x1.e978d4p-8f,  -0x1.c49ba6p-8f,
    -0x1.9fbe76p-8f,  -0x1.7ae148p-8f,  -0x1.56041ap-8f,  -0x1.3126e8p-8f,  -0x1.0c49bap-8f,  -0x1.ced914p-9f,
    -0x1.851eb8p-9f,  -0x1.3b645ap-9f,  -0x1.e353f8p-10f, -0x1.4fdf3ap-10f, -0x1.eecbfep-11f, -0x1.b3d07cp-11f,
    -0x1.78d5p-11f,   -0x1.3dd982p-11f, -0x1.02de02p-11f, -0x1.8fc506p-12f, -0x1.19ce0ap-12f, -0x1.47ae16p-13f,
    -0x1.743e96p-14f, -0x1.15df66p-14f, -0x1.6f0068p-15f, -0x1.64840cp-16f, -0x1.040bfep-17f, -0x1.b43528p-19f,
    -0x1.27476ep-21f, 0x0p+0f,          0x1.27476ep-21f,  0x1.b43528p-19f,  0x1.040bfep-17f,  0x1.64840cp-16f,
    0x1.6f0068p-15f,  0x1.15df66p-14f,  0x1.743e96p-14f,  0x1.47ae16p-13f,  0x1.19ce0ap-12f,  0x1.8fc506p-12f,
    0x1.02de02p-11f,  0x1.3dd982p-11f,  0x1.78d5p-11f,    0x1.b3d07cp-11f,  0x1.eecbfep-11f,  0x1.4fdf3ap-10f,
    0x1.e353f8p-10f,  0x1.3b645ap-9f,   0x1.851eb8p-9f,   0x1.ced914p-9f,   0x1.0c49bap-8f,   0x1.3126e8p-8f,
    0x1.56041ap-8f,   0x1.7ae148p-8f,   0x1.9fbe76p-8f,   0x1.c49ba6p-8f,   0x1.e978d4p-8f,   0x1.072b02p-7f,
    0x1.19999ap-7f,   0x1.2c083p-7f,    0x1.3e76c8p-7f,   0x1.75c29p-7f,    0x1.d1eb86p-7f,   0x1.170a3ep-6f,
    0x1.451ebap-6f,   0x1.733334p-6f,   0x1.a147aep-6f,   0x1.cf5c2ap-6f,   0x1.fd70a4p-6f,   0x1.15c29p-5f,
    0x1.2ccccep-5f,   0x1.43d70ap-5f,   0x1.5ae146p-5f,   0x1.71eb86p-5f,   0x1.88f5c2p-5f,   0x1.ap-5f,
    0x1.b70a3ep-5f,   0x1.ce147ap-5f,   0x1.e51ebap-5f,   0x1.fc28f6p-5f,   0x1.09999ap-4f,   0x1.151ebap-4f,
    0x1.20a3d6p-4f,   0x1.2c28f6p-4f,   0x1.37ae14p-4f,   0x1.433334p-4f,   0x1.4eb854p-4f,   0x1.5a3d7p-4f,
    0x1.65c29p-4f,    0x1.7147aep-4f,   0x1.7ccccep-4f,   0x1.8851eep-4f,   0x1.93d70ap-4f,   0x1.b66668p-4f,
    0x1.fp-4f,        0x1.14ccccp-3f,   0x1.31999ap-3f,   0x1.4e6666p-3f,   0x1.6b3334p-3f,   0x1.88p-3f,
    0x1.a4ccccp-3f,   0x1.c1999ap-3f,   0x1.de6666p-3f,   0x1.fb3332p-3f,   0x1.0cp-2f,       0x1.1a6668p-2f,
    0x1.28ccccp-2f,   0x1.373334p-2f,   0x1.459998p-2f,   0x1.54p-2f,       0x1.626666p-2f,   0x1.70ccccp-2f,
    0x1.7f3334p-2f,   0x1.8d9998p-2f,   0x1.9cp-2f,       0x1.aa6666p-2f,   0x1.b8ccccp-2f,   0x1.c73334p-2f,
    0x1.d59998p-2f,   0x1.e4p-2f,       0x1.f26664p-2f,   0x1.006666p-1f,   0x1.079998p-1f,   0x1.0eccccp-1f,
    0x1.16p-1f,       0x1.1d3334p-1f,   0x1.246668p-1f,   0x1.2b999ap-1f,   0x1.32ccccp-1f,   0x1.3ap-1f,
    0x1.413334p-1f,   0x1.486668p-1f,   0x1.4f999ap-1f,   0x1.56ccccp-1f,   0x1.5ep-1f,       0x1.653334p-1f,
    0x1.6c6668p-1f,   0x1.73999ap-1f,   0x1.7accccp-1f,   0x1.82p-1f,       0x1.893334p-1f,   0x1.906666p-1f,
    0x1.97999ap-1f,   0x1.9eccccp-1f,   0x1.a6p-1f,       0x1.ad3334p-1f,   0x1.b46666p-1f,   0x1.bb999ap-1f,
    0x1.c2ccccp-1f,   0x1.cap-1f,       0x1.d13334p-1f,   0x1.d86666p-1f,   0x1.df999ap-1f,   0x1.e6ccccp-1f,
    0x1.eep-1f,       0x1.f53334p-1f,   0x1.fc6666p-1f,   0x1p+0f,
};

V_TABLE float hstep_dyn8_unsigned[256] = {
    0x0p+0f,         0x1.5cf754p-22f, 0x1.a0133p-21f,  0x1.1d367p-19f,  0x1.2599ecp-18f, 0x1.bc98a2p-18f,
    0x1.29cbaap-17f, 0x1.0624dcp-16f, 0x1.c2e34p-16f,  0x1.3fd0dp-15f,  0x1.9e3p-15f,    0x1.fc8f34p-15f,
    0x1.2d7732p-14f, 0x1.5ca6c8p-14f, 0x1.8bd662p-14f, 0x1.0cb296p-13f, 0x1.82a994p-13f, 0x1.f8a092p-13f,
    0x1.374bc8p-12f, 0x1.724744p-12f, 0x1.ad42c6p-12f, 0x1.e83e44p-12f, 0x1.119ce2p-11f, 0x1.2f1aap-11f,
    0x1.4c986p-11f,  0x1.6a162p-11f,  0x1.8793dep-11f, 0x1.a511ap-11f,  0x1.c28f5ep-11f, 0x1.e00d1cp-11f,
    0x1.fd8adcp-11f, 0x1.2b020cp-10f, 0x1.74bc6ap-10f, 0x1.be76c8p-10f, 0x1.041894p-9f,  0x1.28f5c2p-9f,
    0x1.4dd2fp-9f,   0x1.72b02p-9f,   0x1.978d4ep-9f,  0x1.bc6a8p-9f,   0x1.e147aep-9f,  0x1.03126ep-8f,
    0x1.158104p-8f,  0x1.27ef9ep-8f,  0x1.3a5e34p-8f,  0x1.4cccccp-8f,  0x1.5f3b64p-8f,  0x1.71a9fap-8f,
    0x1.841894p-8f,  0x1.96872ap-8f,  0x1.a8f5c2p-8f,  0x1.bb645cp-8f,  0x1.cdd2fp-8f,   0x1.e0418ap-8f,
    0x1.f2b01ep-8f,  0x1.028f5cp-7f,  0x1.0bc6a8p-7f,  0x1.14fdf2p-7f,  0x1.1e354p-7f,   0x1.276c8ap-7f,
    0x1.30a3d6p-7f,  0x1.39db24p-7f,  0x1.43126ep-7f,  0x1.5eb854p-7f,  0x1.8ccccep-7f,  0x1.bae146p-7f,
    0x1.e8f5c4p-7f,  0x1.0b851ep-6f,  0x1.228f5ep-6f,  0x1.39999ap-6f,  0x1.50a3d6p-6f,  0x1.67ae16p-6f,
    0x1.7eb852p-6f,  0x1.95c28ep-6f,  0x1.accccep-6f,  0x1.c3d70ep-6f,  0x1.dae146p-6f,  0x1.f1eb86p-6f,
    0x1.047aep-5f,   0x1.1p-5f,       0x1.1b851ep-5f,  0x1.270a3ep-5f,  0x1.328f5ep-5f,  0x1.3e147ap-5f,
    0x1.49999ap-5f,  0x1.551eb8p-5f,  0x1.60a3d6p-5f,  0x1.6c28f6p-5f,  0x1.77ae14p-5f,  0x1.833334p-5f,
    0x1.8eb85p-5f,   0x1.9a3d7p-5f,   0x1.a5c28ep-5f,  0x1.b147aep-5f,  0x1.bccccep-5f,  0x1.c851eep-5f,
    0x1.d3d70ep-5f,  0x1.df5c2ap-5f,  0x1.eae146p-5f,  0x1.f66666p-5f,  0x1.00f5c4p-4f,  0x1.06b854p-4f,
    0x1.0c7ae2p-4f,  0x1.123d7p-4f,   0x1.18p-4f,      0x1.1dc29p-4f,   0x1.23852p-4f,   0x1.2947aep-4f,
    0x1.2f0a3ep-4f,  0x1.34cccep-4f,  0x1.3a8f5ep-4f,  0x1.4051ecp-4f,  0x1.46147cp-4f,  0x1.4bd70ap-4f,
    0x1.51999ap-4f,  0x1.575c2ap-4f,  0x1.5d1eb8p-4f,  0x1.62e148p-4f,  0x1.68a3d6p-4f,  0x1.6e6666p-4f,
    0x1.7428f6p-4f,  0x1.79eb86p-4f,  0x1.7fae16p-4f,  0x1.8570a4p-4f,  0x1.8b3334p-4f,  0x1.90f5c4p-4f,
    0x1.96b852p-4f,  0x1.a8p-4f,      0x1.c4ccccp-4f,  0x1.e1999ap-4f,  0x1.fe6666p-4f,  0x1.0d9998p-3f,
    0x1.1cp-3f,      0x1.2a6668p-3f,  0x1.38ccccp-3f,  0x1.473334p-3f,  0x1.559998p-3f,  0x1.64p-3f,
    0x1.726668p-3f,  0x1.80ccccp-3f,  0x1.8f3334p-3f,  0x1.9d9998p-3f,  0x1.acp-3f,      0x1.ba6668p-3f,
    0x1.c8ccccp-3f,  0x1.d73334p-3f,  0x1.e59998p-3f,  0x1.f4p-3f,      0x1.013332p-2f,  0x1.086666p-2f,
    0x1.0f999ap-2f,  0x1.16ccccp-2f,  0x1.1ep-2f,      0x1.253334p-2f,  0x1.2c6666p-2f,  0x1.339998p-2f,
    0x1.3accccp-2f,  0x1.42p-2f,      0x1.493334p-2f,  0x1.506666p-2f,  0x1.579998p-2f,  0x1.5eccccp-2f,
    0x1.66p-2f,      0x1.6d3334p-2f,  0x1.746666p-2f,  0x1.7b9998p-2f,  0x1.82ccccp-2f,  0x1.8ap-2f,
    0x1.913334p-2f,  0x1.986666p-2f,  0x1.9f9998p-2f,  0x1.a6ccccp-2f,  0x1.aep-2f,      0x1.b53334p-2f,
    0x1.bc6666p-2f,  0x1.c39998p-2f,  0x1.caccccp-2f,  0x1.d2p-2f,      0x1.d93334p-2f,  0x1.e06666p-2f,
    0x1.e79998p-2f,  0x1.eeccccp-2f,  0x1.f6p-2f,      0x1.fd3332p-2f,  0x1.023334p-1f,  0x1.05ccccp-1f,
    0x1.096666p-1f,  0x1.0dp-1f,      0x1.109998p-1f,  0x1.143334p-1f,  0x1.17ccccp-1f,  0x1.1b6668p-1f,
    0x1.1fp-1f,      0x1.22999ap-1f,  0x1.263334p-1f,  0x1.29ccccp-1f,  0x1.2d6668p-1f,  0x1.31p-1f,
    0x1.34999ap-1f,  0x1.383334p-1f,  0x1.3bccccp-1f,  0x1.3f6668p-1f,  0x1.43p-1f,      0x1.46999ap-1f,
    0x1.4a3334p-1f,  0x1.4dccccp-1f,  0x1.516668p-1f,  0x1.55p-1f,      0x1.58999ap-1f,  0x1.5c3334p-1f,
    0x1.5fccccp-1f,  0x1.636668p-1f,  0x1.67p-1f,      0x1.6a999ap-1f,  0x1.6e3334p-1f,  0x1.71ccccp-1f,
    0x1.756668p-1f,  0x1.79p-1f,      0x1.7c999ap-1f,  0x1.803334p-1f,  0x1.83ccccp-1f,  0x1.876668p-1f,
    0x1.8bp-1f,      0x1.8e9998p-1f,  0x1.923334p-1f,  0x1.95ccccp-1f,  0x1.996668p-1f,  0x1.9dp-1f,
    0x1.a09998p-1f,  0x1.a43334p-1f,  0x1.a7ccccp-1f,  0x1.ab6668p-1f,  0x1.afp-1f,      0x1.b29998p-1f,
    0x1.b63334p-1f,  0x1.b9ccccp-1f,  0x1.bd6668p-1f,  0x1.c1p-1f,      0x1.c49998p-1f,  0x1.c83334p-1f,
    0x1.cbccccp-1f,  0x1.cf6668p-1f,  0x1.d3p-1f,      0x1.d69998p-1f,  0x1.da3334p-1f,  0x1.ddccccp-1f,
    0x1.e16668p-1f,  0x1.e5p-1f,      0x1.e89998p-1f,  0x1.ec3334p-1f,  0x1.efccccp-1f,  0x1.f36668p-1f,
    0x1.f7p-1f,      0x1.fa9998p-1f,  0x1.fe3334p-1f,  0x1p+0f,
};

V_TABLE float hstep_dyn4_signed[16] = {
    -0x1.c66666p-1f, -0x1.533334p-1f, -0x1.cp-2f,     -0x1.b33332p-3f, -0x1.3d70a4p-4f, -0x1.0a3d72p-5f,
    -0x1.6872bp-8f,  0x0p+0f,         0x1.6872bp-8f,  0x1.0a3d72p-5f,  0x1.3d70a4p-4f,  0x1.b33332p-3f,
    0x1.cp-2f,       0x1.533334p-1f,  0x1.c66666p-1f, 0x1p+0f,
};

/* Returns the scale's pattern. */
V_OP vi hstep_dyn_scale(vf maximum) { return v_bits(v_max(v_set(1e-12f), maximum)); }

/* Sets slope and start in lanes above `edge`, the lower end of a decade. They give a count p = round(a slope + start);
 * the entry nearest to a is p or p + 1. Entries are counted from zero up; zero is -1 in a signed map and 0 in an
 * unsigned one.
 *
 * Borders between nearest entries are the edges of the equal parts, with two exceptions. A decade's first is a fifth of
 * a part late, and the one below 1 is half a part early. So within a decade the count is linear in a. Rounding at three
 * quarters of a part makes errors of a twentieth harmless. */
V_OP void hstep_dyn_decade(vf a, const float edge, const float power, const int count, vf *slope, vf *start)
{
    vm above = v_gt(a, v_set(edge));
    *slope = v_select(above, v_set(power / 0.9f * (float)count), *slope);
    *start = v_select(above, v_set((float)count * (8.0f / 9.0f) - 1.75f), *start);
}

V_OP vi hstep_dyn_below(vf a, const int decades, const int first)
{
    vf slope = v_set((decades == 7 ? 1e6f : 1e2f) / 0.9f * (float)first);
    vf start = v_set((float)first * (8.0f / 9.0f) - 1.75f);
    /* Stored bytes may be anything, such as a negative scale. The limits keep look-ups within the map. */
    a = v_max(v_min(a, v_set(1.0f)), v_set(0.0f));
    if (decades == 7) {
        hstep_dyn_decade(a, 1e-6f, 1e5f, first << 1, &slope, &start);
        hstep_dyn_decade(a, 1e-5f, 1e4f, first << 2, &slope, &start);
        hstep_dyn_decade(a, 1e-4f, 1e3f, first << 3, &slope, &start);
        hstep_dyn_decade(a, 1e-3f, 1e2f, first << 4, &slope, &start);
    }
    hstep_dyn_decade(a, 1e-2f, 1e1f, first << (decades - 2), &slope, &start);
    hstep_dyn_decade(a, 1e-1f, 1e0f, first << (decades - 1), &slope, &start);
    return v_round(v_add(v_mul(a, slope), start));
}

/* Does the work of hstep_dyn_below() for a signed map. Its codes rise from the largest negative entry through zero,
 * code 2^decades - 1, to 1. */
V_OP vi hstep_dyn_signed_below(vf n, const int decades)
{
    vi count = hstep_dyn_below(v_abs(n), decades, 1);
    vi positive = vi_add(count, vi_set(1u << decades)), negative = vi_sub(vi_set((1u << decades) - 3), count);
    return vi_max(vi_select(v_lt(n, v_set(0.0f)), negative, positive), vi_set(0));
}

/* Returns `below` or one more, the code nearest to n. q and next are the map's entries there. */
V_OP vi hstep_dyn_nearest(vf n, vi below, vf q, vf next)
{
    vm stay = v_lt(v_sub(n, q), v_mul(v_sub(next, q), v_set(0.5f)));
    return vi_select(stay, below, vi_add(below, vi_set(1)));
}

#endif
