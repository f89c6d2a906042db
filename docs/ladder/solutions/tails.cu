        const bool inside = k + first < p.k;
        const uint4 of_a = inside ? load(a + k) : make_uint4(0, 0, 0, 0);
        const uint4 of_b = inside ? load(b + k) : make_uint4(0, 0, 0, 0);
