/* Matrices as muon needs them: the layout that product.h works on, and the constants of its iteration. */
#ifndef HSTEP_MATRIX_H
#define HSTEP_MATRIX_H

/* Shape of the tile that one kernel call works on: strips of so many rows of the left matrix, panels of so many columns of
 * the right one. Both are stored along the inner dimension, in pieces of one row's or column's width, padded with zeros. */
#define HSTEP_STRIP 12
#define HSTEP_PANEL 32

/* The constants k[] of a tensor that muon steps as a matrix (rules/muon.h). The new weight is w - (SCALE * O + DECAY * w) with
 * O from hstep_newton_schulz() by A, B, C, STEPS and EPS. */
enum {
    MUON_OLD, MUON_NEW, MUON_GRADIENT, MUON_BUFFER, MUON_SCALE, MUON_DECAY, MUON_A, MUON_B, MUON_C, MUON_STEPS, MUON_EPS
};

#endif
