"""The experiments of "DP-SGD with weight clipping" (Barczewski and Ramon, 2024), at equal true epsilon."""
