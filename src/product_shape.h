/* Shape of the tile that one call of a product's kernel works on: strips of so many rows of the left matrix, panels of
 * so many columns of the right one. Both are stored along the inner dimension, in pieces of one row's or column's
 * width, padded with zeros. */
#ifndef HSTEP_PRODUCT_SHAPE_H
#define HSTEP_PRODUCT_SHAPE_H

#define HSTEP_STRIP 12
#define HSTEP_PANEL 32

#endif
