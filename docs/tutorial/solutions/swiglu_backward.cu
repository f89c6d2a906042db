        // Solution of swiglu_backward. With A' = S act, the output is A' W_down^T, so the gradient of act is S dA', and that of S
        // is <dA', act>: without S.
        const float s = score[h];
        d_score[h] += d_a * value * up;
        return {s * d_a * slope * up, s * d_a * value * up_slope, s * value * up};
