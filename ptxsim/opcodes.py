"""The opcodes that the machine has beside arithmetic, with all their modifiers: what matches none of these lines is refused.

A modifier that changes nothing here, of scope or caches, is listed too; a new one has to be thought of first.
"""

import re

_SCOPE, _SHARED = r"(\.(cta|cluster|gpu|sys))?", r"(\.shared(::cta)?)?"
_CACHE = r"(\.(nc|ca|cg|cs|lu|cv|wb|wt|L1::\w+|L2::(64|128|256)B))*"
_WHERE = r"(\.(global|shared(::cta|::cluster)?))?"
_ELEMENTS = r"(\.v[24])?\.([bus](8|16|32|64)|f(32|64))"
OPCODES = re.compile(
    "|".join(
        (
            rf"ld(\.(weak|volatile|(relaxed|acquire){_SCOPE}))?({_WHERE}|\.const|\.param){_CACHE}{_ELEMENTS}",
            rf"st(\.(weak|volatile|(relaxed|release){_SCOPE}))?{_WHERE}{_CACHE}{_ELEMENTS}",
            rf"red(\.(relaxed|release))?{_SCOPE}(\.global)?\.add\.v[24]\.f32",
            rf"(atom|red)(\.(relaxed|acquire|release|acq_rel))?{_SCOPE}{_WHERE}"
            r"\.(add\.([us]32|u64|f32|f64)|(min|max)\.[us](32|64)|(and|or|xor|exch|cas)\.b(32|64)|cas\.b16|(inc|dec)\.u32)",
            rf"(ld|st)matrix\.sync\.aligned\.m8n8\.x[124](\.trans)?{_SHARED}\.b16",
            r"cvta(\.to)?\.(global|shared(::cta|::cluster)?|const|param)\.u(32|64)",
            r"mapa\.shared::cluster\.u32",
            r"bar\.warp\.sync|elect\.sync|shfl\.sync\.(up|down|bfly|idx)\.b32|vote\.sync\.((all|any|uni)\.pred|ballot\.b32)",
            r"redux\.sync\.((add|min|max)\.[us]32|(and|or|xor)\.b32)",
            r"bar(rier)?(\.cta)?\.((sync|arrive)(\.aligned)?|red\.((and|or)(\.aligned)?\.pred|popc(\.aligned)?\.u32))",
            r"barrier\.cluster\.(arrive(\.release|\.relaxed)?|wait(\.acquire)?)(\.aligned)?",
            rf"mbarrier\.(init|inval|(arrive|expect_tx|arrive\.expect_tx)(\.(release|relaxed))?{_SCOPE}){_WHERE}\.b64",
            rf"mbarrier\.(test|try)_wait\.parity(\.(acquire|relaxed))?{_SCOPE}{_SHARED}\.b64",
            rf"fence(\.(sc|acq_rel|acquire|release))?{_SCOPE}|membar\.(cta|gl|sys)|fence\.mbarrier_init\.release\.cluster",
            r"fence\.proxy\.async(\.global|\.shared::(cta|cluster))?",
            r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32|nanosleep\.u32|griddepcontrol\.(wait|launch_dependents)|trap",
            rf"cp\.async\.(ca|cg){_SHARED}\.global(\.L2::(64|128|256)B)?|cp\.async\.mbarrier\.arrive\.noinc{_SHARED}\.b64",
            r"cp\.async\.(commit_group|wait_group|wait_all|bulk\.commit_group|bulk\.wait_group(\.read)?)",
            r"cp\.async\.bulk\.tensor\.[1-5]d\.shared::(cta|cluster)\.global(\.tile)?\.mbarrier::complete_tx::bytes"
            r"(\.multicast::cluster)?(\.L2::cache_hint)?",
            r"cp\.async\.bulk\.tensor\.[1-5]d\.global\.shared::cta(\.tile)?\.bulk_group(\.L2::cache_hint)?",
            r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16\.bf16\.f32",
            r"wgmma\.(fence|commit_group|wait_group)\.sync\.aligned",
            r"wgmma\.mma_async\.sync\.aligned\.m64n\d+(k16\.f32\.(bf16\.bf16|f16\.f16)|k32\.f32\.e4m3\.e4m3)",
        )
    )
)
