#include "plumb/operators/operator_table.h"

#include <algorithm>

namespace plumb {
namespace {

using enum ContractionKind;
using enum DataSizes;

constexpr const char* kOneLibrary = "it belongs to one library, whose kernels take their arguments on trust";
constexpr const char* kQuantised = "it is about quantized tensors, which no graph of plumb holds";
constexpr const char* kSparse = "it is about sparse tensors, whose indices nobody checks";
constexpr const char* kForeignMemory = "it can reach memory that is not its tensors' own";
constexpr const char* kAutograd = "it acts on autograd's graph instead of computing";
constexpr const char* kTestOfItself = "it is torch's test of itself";

constexpr OperatorGroup kGroups[] = {
    // --- products ---
    {"aten::", "linear", {.contraction = Contraction::linear()}},
    {"aten::", "matmul linalg_matmul", {.contraction = Contraction::product("self", -1, "other", -2)}},
    {"aten::", "mm bmm", {.contraction = Contraction::product("self", -1, "mat2", -2)}},
    {"aten::", "mv", {.contraction = Contraction::product("self", -1, "vec", -1)}},
    {"aten::", "addmv", {.in_place_alike = true, .contraction = Contraction::product("mat", -1, "vec", -1)}},
    {"aten::", "dot", {.contraction = Contraction::product("self", -1, "tensor", -1)}},
    {"aten::", "inner vdot", {.contraction = Contraction::product("self", -1, "other", -1)}},
    {"aten::", "linalg_vecdot", {.contraction = Contraction::product("x", -1, "y", -1)}},
    {"aten::", "_grouped_mm", {.contraction = Contraction::product("self", -1, "mat2", -2), .groups = "offs"}},
    // The library transformers has its own, for devices without torch's.
    {"transformers::",
     "grouped_mm_fallback",
     {.refused = kOneLibrary, .contraction = Contraction::product("input", -1, "weight", -2), .groups = "offs"}},
    {"aten::", "tensordot", {.contraction = {Einsum, {{"self"}, {"other"}}}}},
    {"aten::", "_addmm_activation", {.contraction = Contraction::product("mat1", -1, "mat2", -2)}},
    {"aten::", "addmm", {.in_place_alike = true, .contraction = Contraction::product("mat1", -1, "mat2", -2)}},
    {"aten::", "baddbmm", {.in_place_alike = true, .contraction = Contraction::product("batch1", -1, "batch2", -2)}},
    {"aten::", "addbmm", {.in_place_alike = true, .contraction = {BatchProduct, {{"batch1"}, {"batch2", -2}}}}},
    {"aten::", "bilinear", {.contraction = {Bilinear, {{"input1"}, {"input2"}, {"weight"}}}}},
    {"aten::", "einsum", {.may_alias = true, .contraction = {Einsum, {{"tensors"}}}}},
    // "convolution" says by an argument whether it is transposed: who needs that asks the node.
    {"aten::",
     "convolution _convolution _convolution_mode",
     {.contraction = {Convolution, {{"input", 1}, {"weight", 1}}, 1}}},
    {"aten::", "conv1d", {.contraction = Contraction::convolution(1)}},
    {"aten::", "conv2d", {.contraction = Contraction::convolution(2)}},
    {"aten::", "conv3d", {.contraction = Contraction::convolution(3)}},
    {"aten::", "conv_transpose1d", {.contraction = Contraction::transposed_convolution(1)}},
    {"aten::", "conv_transpose2d", {.contraction = Contraction::transposed_convolution(2)}},
    {"aten::", "conv_transpose3d", {.contraction = Contraction::transposed_convolution(3)}},

    // --- recurrent ---
    {"aten::", "lstm", {.draws_if = "train", .draws_with = "dropout", .recurrent = RecurrentLayer::Lstm}},
    {"aten::", "gru", {.draws_if = "train", .draws_with = "dropout", .recurrent = RecurrentLayer::Gru}},
    {"aten::", "rnn_tanh", {.draws_if = "train", .draws_with = "dropout", .recurrent = RecurrentLayer::Tanh}},
    {"aten::", "rnn_relu", {.draws_if = "train", .draws_with = "dropout", .recurrent = RecurrentLayer::Relu}},
    {"aten::", "lstm_cell", {.recurrent = RecurrentLayer::Lstm, .recurrent_cell = true}},
    {"aten::", "gru_cell", {.recurrent = RecurrentLayer::Gru, .recurrent_cell = true}},
    {"aten::", "rnn_tanh_cell", {.recurrent = RecurrentLayer::Tanh, .recurrent_cell = true}},
    {"aten::", "rnn_relu_cell", {.recurrent = RecurrentLayer::Relu, .recurrent_cell = true}},

    // --- norms that write their running statistics ---
    {"aten::",
     "batch_norm native_batch_norm _batch_norm_impl_index",
     {.writes = {"running_mean", "running_var"}, .writes_if = "training"}},
    {"aten::", "instance_norm", {.writes = {"running_mean", "running_var"}, .writes_if = "use_input_stats"}},
    {"aten::",
     "cudnn_batch_norm miopen_batch_norm",
     {.refused = kOneLibrary, .writes = {"running_mean", "running_var"}, .writes_if = "training"}},

    // --- random ---
    {"aten::",
     "scaled_dot_product_attention _scaled_dot_product_attention_math _scaled_dot_product_cudnn_attention "
     "_scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention "
     "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_fused_attention_overrideable",
     {.draws_with = "dropout_p", .contraction = Contraction::attention()}},
    {"aten::", "_fused_sdp_choice", {.draws_with = "dropout_p"}},
    {"aten::",
     "feature_dropout alpha_dropout feature_alpha_dropout native_dropout",
     {.may_alias = true, .draws_if = "train"}},
    {"aten::", "dropout", {.may_alias = true, .draws_if = "train", .in_place_alike = true}},
    {"aten::", "dropout_ feature_dropout_ alpha_dropout_ feature_alpha_dropout_", {.draws_if = "train"}},
    {"aten::", "rrelu rrelu_", {.draws_if = "training"}},
    {"aten::",
     "_cudnn_attention_forward _efficient_attention_forward _flash_attention_forward "
     "_flash_attention_forward_no_dropout_inplace _scaled_dot_product_attention_math_for_mps "
     "_triton_scaled_dot_attention _fill_mem_eff_dropout_mask_",
     {.refused = kOneLibrary, .draws_with = "dropout_p"}},

    // --- operators that pass their argument through ---
    {"aten::",
     "alias mT movedim numpy_T permute squeeze swapaxes t transpose unsqueeze view view_as",
     {.passes_through = true, .rearranges = true, .plain_view = true}},
    {"aten::",
     "chunk detach expand expand_as narrow select slice split split_with_sizes unbind",
     {.passes_through = true, .plain_view = true}},
    {"aten::",
     "clone contiguous flatten reshape reshape_as swapdims unflatten",
     {.passes_through = true, .rearranges = true}},
    {"aten::", "_unsafe_view", {.may_alias = true, .passes_through = true, .rearranges = true}},
    {"aten::", "lift_fresh matrix_H resolve_conj resolve_neg tensor_split to _to_copy", {.passes_through = true}},
    {"aten::", "diagonal unfold", {.plain_view = true}},
    {"aten::", "type_as", {.may_alias = true, .passes_through = true}},

    // --- may return an input, and no schema says so ---
    {"aten::",
     "atleast_1d atleast_2d atleast_3d broadcast_tensors cartesian_prod chain_matmul conj_physical "
     "flatten_dense_tensors histogramdd meshgrid pad rms_norm sum_to_size unflatten_dense_tensors unsafe_chunk "
     "unsafe_split unsafe_split_with_sizes",
     {.may_alias = true}},

    // --- memory as it was found ---
    {"aten::",
     "empty empty_like empty_permuted empty_strided new_empty new_empty_strided resize_",
     {.uninitialised = true}},
    {"aten::", "empty_quantized", {.refused = kQuantised, .uninitialised = true}},

    // --- values and sizes that depend on data ---
    {"aten::", "item _local_scalar_dense is_nonzero equal allclose", {.reads_value = true}},
    {"aten::", "q_scale q_zero_point _choose_qparams_per_tensor", {.refused = kQuantised, .reads_value = true}},
    {"aten::", "_nnz", {.refused = kSparse, .reads_value = true}},
    {"aten::", "index", {.data_sizes = OfMasks}},
    {"aten::", "where", {.data_sizes = OfCondition}},
    {"aten::", "nonzero_numpy _pack_padded_sequence _pad_packed_sequence", {.data_sizes = Always}},

    // --- no tensor arithmetic ---
    {"aten::", "from_file", {.refused = "it opens files"}},
    {"aten::", "_print", {.refused = "it writes to the terminal"}},
    {"aten::", "set set_ set_data", {.refused = kForeignMemory}},
    {"aten::", "_reshape_alias", {.refused = "it looks at memory without asking whether that is its tensor's"}},
    {"aten::", "_backward retain_grad get_gradients", {.refused = kAutograd}},
    {"aten::", "record_stream", {.refused = "it is about a device's streams"}},

    // --- whole namespaces ---
    {"",
     "_c10d_functional:: _c10d_functional_autograd:: _dtensor:: c10d:: symm_mem:: rpc::",
     {.refused = "it talks to other processes", .has_effects = true}},
    {"", "inductor:: aoti_torch::", {.refused = kForeignMemory}},
    {"", "prim:: static_runtime::", {.refused = "it belongs to TorchScript's interpreter"}},
    {"", "profiler::", {.refused = "it is about torch's profiler"}},
    {"", "_test::", {.refused = kTestOfItself}},
    {"", "mkldnn:: mkldnn_prepacked:: mkl:: onednn::", {.refused = kOneLibrary}},
    {"", "quantized:: _quantized:: quantization::", {.refused = kQuantised}},
    {"", "sparse::", {.refused = kSparse}},

    {"aten::", "_cummax_helper _cummin_helper", {.refused = "it writes into tensors without asking whether they fit"}},

    // --- operators that a file may name, and no more ---
    {"aten::",
     "__and__ __iand__ __ilshift__ __ior__ __irshift__ __ixor__ __lshift__ __or__ __rshift__ __xor__ "
     "_adaptive_avg_pool2d _adaptive_avg_pool3d _add_relu _aminmax _assert_async _assert_scalar "
     "_assert_tensor_metadata _autocast_to_full_precision _autocast_to_reduced_precision _batch_norm_no_update "
     "_batch_norm_with_update _batch_norm_with_update_functional _cast_Byte _cast_Char _cast_Double _cast_Float "
     "_cast_Half _cast_Int _cast_Long _cast_Short _cdist_forward _chunk_cat _compute_linear_combination _conj "
     "_conj_copy _conj_physical _ctc_loss _dim_arange _dirichlet_grad "
     "_efficientzerotensor _embedding_bag _embedding_bag_forward_only _euclidean_dist _fft_c2c _fft_c2r _fft_r2c "
     "_foreach_abs _foreach_acos _foreach_add _foreach_addcdiv _foreach_addcmul _foreach_asin _foreach_atan "
     "_foreach_ceil _foreach_clamp_max _foreach_clamp_min _foreach_clone _foreach_copy _foreach_cos _foreach_cosh "
     "_foreach_div _foreach_erf _foreach_erfc _foreach_exp _foreach_expm1 _foreach_floor _foreach_frac _foreach_lerp "
     "_foreach_lgamma _foreach_log _foreach_log10 _foreach_log1p _foreach_log2 _foreach_max _foreach_maximum "
     "_foreach_minimum _foreach_mm _foreach_mul _foreach_neg _foreach_norm _foreach_pow _foreach_powsum "
     "_foreach_reciprocal _foreach_round _foreach_rsqrt _foreach_sigmoid _foreach_sign _foreach_sin _foreach_sinh "
     "_foreach_sqrt _foreach_sub _foreach_tan _foreach_tanh _foreach_trunc _foreach_zero _functional_assert_async "
     "_functional_assert_scalar _functional_sym_constrain_range _functional_sym_constrain_range_for_size "
     "_fused_dropout _fused_rms_norm _int_mm _is_all_true _is_any_true _is_zerotensor "
     "_linalg_check_errors _linalg_det _linalg_eigh _linalg_eigvals _linalg_slogdet _linalg_solve_ex _linalg_svd "
     "_log_softmax _log_softmax_backward_data _logcumsumexp _lu_with_info _masked_scale _masked_softmax "
     "_native_batch_norm_legit _native_batch_norm_legit_functional _native_batch_norm_legit_no_training "
     "_native_multi_head_attention _neg_view _neg_view_copy _pad_circular _pad_enum _pdist_forward _prelu_kernel "
     "_prelu_kernel_backward _reshape_copy _reshape_from_tensor _safe_softmax _sample_dirichlet _scaled_mm "
     "_shape_as_tensor _softmax _softmax_backward_data _stack _standard_gamma _standard_gamma_grad "
     "_thnn_fused_gru_cell _thnn_fused_lstm_cell _transform_bias_rescale_qkv _transformer_encoder_layer_fwd "
     "_trilinear _unique _unique2 _unsafe_index _unsafe_index_put _unsafe_masked_index "
     "_unsafe_masked_index_put_accumulate _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_lanczos2d_aa "
     "_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d _weight_norm "
     "_weight_norm_interface absolute acos acosh adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d "
     "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d adjoint affine_grid_generator alias_copy all amax "
     "amin aminmax angle any arange arccos arccosh arcsin arcsinh arctan arctan2 arctanh argmax argmin argsort "
     "argwhere as_strided as_strided_copy as_strided_scatter asin asinh atanh avg_pool1d avg_pool2d avg_pool3d "
     "bartlett_window batch_norm_backward_elemt batch_norm_backward_reduce bernoulli binary_cross_entropy "
     "binary_cross_entropy_backward binary_cross_entropy_with_logits bincount binomial bitwise_left_shift "
     "bitwise_right_shift blackman_window block_diag broadcast_to bucketize can_cast cat cauchy cdist celu chalf "
     "channel_shuffle cholesky cholesky_inverse cholesky_solve clip col2im column_stack combinations complex concat "
     "concatenate conj constant_pad_nd conv_tbc convolution_backward copy copysign corrcoef cosine_embedding_loss "
     "cosine_similarity count_nonzero cov cross cross_entropy_loss ctc_loss cummax cummaxmin_backward cummin cumprod "
     "cumprod_backward cumsum cumulative_trapezoid deg2rad det detach_copy diag diag_embed diagflat diagonal_backward "
     "diagonal_copy diagonal_scatter diff digamma dim dist divide dsplit dstack elu elu_backward embedding "
     "embedding_bag embedding_renorm embedding_renorm_ eq erfinv expand_copy exponential eye "
     "fake_quantize_per_channel_affine fake_quantize_per_channel_affine_cachemask fake_quantize_per_tensor_affine "
     "fake_quantize_per_tensor_affine_cachemask fft_fft fft_fft2 fft_fftfreq fft_fftn fft_fftshift fft_hfft fft_hfft2 "
     "fft_hfftn fft_ifft fft_ifft2 fft_ifftn fft_ifftshift fft_ihfft fft_ihfft2 fft_ihfftn fft_irfft fft_irfft2 "
     "fft_irfftn fft_rfft fft_rfft2 fft_rfftfreq fft_rfftn fill_diagonal_ fix flip fliplr flipud float_power fmax "
     "fmin frac fractional_max_pool2d fractional_max_pool3d frexp frobenius_norm full full_like gather "
     "gather_backward gcd ge gelu_backward geometric geqrf ger glu glu_backward gradient greater greater_equal "
     "grid_sampler grid_sampler_2d grid_sampler_3d group_norm gt hamming_window hann_window hardshrink "
     "hardshrink_backward hardsigmoid_backward hardswish_backward hardtanh_backward heaviside hinge_embedding_loss "
     "histc histogram hsplit hstack huber_loss huber_loss_backward i0 igamma igammac im2col imag "
     "index_reduce index_select index_select_backward infinitely_differentiable_gelu_backward inverse is_complex "
     "is_conj is_contiguous is_floating_point is_neg is_same_size is_signed isclose isfinite isin isinf isnan "
     "isneginf isposinf isreal istft kaiser_window kl_div kron kthvalue l1_loss layer_norm lcm ldexp le "
     "leaky_relu_backward less less_equal lgamma lift_fresh_copy linalg__powsum linalg_cholesky linalg_cholesky_ex "
     "linalg_cond linalg_cross linalg_det linalg_diagonal linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh "
     "linalg_householder_product linalg_inv linalg_inv_ex linalg_ldl_factor linalg_ldl_factor_ex linalg_ldl_solve "
     "linalg_lstsq linalg_lu linalg_lu_factor linalg_lu_factor_ex linalg_lu_solve linalg_matrix_exp "
     "linalg_matrix_norm linalg_matrix_power linalg_matrix_rank linalg_multi_dot linalg_norm linalg_pinv linalg_qr "
     "linalg_slogdet linalg_solve linalg_solve_ex linalg_solve_triangular linalg_svd linalg_svdvals linalg_tensorinv "
     "linalg_tensorsolve linalg_vander linalg_vector_norm linear_backward linspace log_normal "
     "log_sigmoid log_sigmoid_backward log_sigmoid_forward log_softmax logaddexp logaddexp2 logcumsumexp logdet "
     "logical_and logical_not logical_or logical_xor logit logit_backward logspace logsumexp lt lu_solve lu_unpack mH "
     "margin_ranking_loss masked_scatter masked_scatter_backward masked_select masked_select_backward matmul_backward "
     "matrix_exp matrix_power max max_pool1d max_pool1d_with_indices max_pool2d max_pool2d_with_indices max_pool3d "
     "max_pool3d_with_indices max_unpool2d max_unpool3d maximum mean median min minimum mish_backward mode moveaxis "
     "mse_loss mse_loss_backward msort multi_margin_loss multilabel_margin_loss multilabel_margin_loss_forward "
     "multinomial multiply mvlgamma nanmean nanmedian nanquantile nansum narrow_copy native_channel_shuffle "
     "native_dropout_backward native_group_norm native_layer_norm native_norm ne negative new_full new_ones new_zeros "
     "nextafter nll_loss nll_loss2d nll_loss2d_forward nll_loss_forward nll_loss_nd nonzero nonzero_static norm "
     "norm_except_dim normal normal_functional not_equal nuclear_norm numel one_hot ones ones_like orgqr ormqr outer "
     "pad_sequence pairwise_distance pdist permute_copy pinverse pixel_shuffle pixel_unshuffle poisson "
     "poisson_nll_loss polar polygamma positive prelu prod promote_types put qr quantile rad2deg rand rand_like "
     "randint randint_like randn randn_like random randperm range ravel real reflection_pad1d reflection_pad2d "
     "reflection_pad3d renorm repeat repeat_interleave replication_pad1d replication_pad2d replication_pad3d "
     "requires_grad_ resize_as_ result_type roll rot90 row_stack rrelu_with_noise "
     "rrelu_with_noise_backward rrelu_with_noise_functional rsub scalar_tensor scatter_reduce searchsorted "
     "segment_reduce select_backward select_copy select_scatter selu sgn sigmoid_backward signbit silu_backward sinc "
     "size slice_backward slice_copy slice_scatter slogdet slow_conv3d slow_conv_dilated2d slow_conv_dilated3d "
     "slow_conv_transpose2d slow_conv_transpose3d smooth_l1_loss smooth_l1_loss_backward soft_margin_loss "
     "soft_margin_loss_backward softmax softplus softplus_backward softshrink softshrink_backward sort "
     "special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 "
     "special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v "
     "special_chebyshev_polynomial_w special_digamma special_entr special_erf special_erfc special_erfcx "
     "special_erfinv special_exp2 special_expit special_expm1 special_gammainc special_gammaincc special_gammaln "
     "special_hermite_polynomial_h special_hermite_polynomial_he special_i0 special_i0e special_i1 special_i1e "
     "special_laguerre_polynomial_l special_legendre_polynomial_p special_log1p special_log_ndtr special_log_softmax "
     "special_logit special_logsumexp special_modified_bessel_i0 special_modified_bessel_i1 "
     "special_modified_bessel_k0 special_modified_bessel_k1 special_multigammaln special_ndtr special_ndtri "
     "special_polygamma special_psi special_round special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 "
     "special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u "
     "special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w special_sinc special_softmax "
     "special_spherical_bessel_j0 special_xlog1py special_xlogy special_zeta split_copy split_with_sizes_copy "
     "squeeze_copy stack std std_mean stft storage_offset stride subtract sum svd sym_constrain_range "
     "sym_constrain_range_for_size sym_is_contiguous sym_numel sym_size sym_storage_offset sym_stride t_copy take "
     "take_along_dim tanh_backward thnn_conv2d threshold_backward tile to_dense topk trace trace_backward "
     "transpose_copy trapezoid trapz triangular_solve tril_indices triplet_margin_loss triu_indices true_divide "
     "unbind_copy unfold_backward unfold_copy uniform unique_consecutive unique_dim "
     "unique_dim_consecutive unsqueeze_copy upsample_bicubic2d "
     "upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d "
     "upsample_trilinear3d value_selecting_reduction_backward vander var var_mean view_as_complex "
     "view_as_complex_copy view_as_real view_as_real_copy view_copy vsplit vstack zeros zeros_like"},
    {"aten::",
     "abs add addcdiv addcmul addr atan atan2 bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max "
     "clamp_min cos cosh div erf erfc exp exp2 expm1 fill floor floor_divide fmod gelu hardsigmoid hardswish hardtanh "
     "hypot index_add index_copy index_fill index_put leaky_relu lerp log log10 log1p log2 masked_fill mish mul "
     "nan_to_num neg pow reciprocal relu relu6 remainder round rsqrt scatter scatter_add sigmoid sign silu sin sinh "
     "sqrt square sub tan tanh threshold tril triu trunc xlogy zero",
     {.in_place_alike = true}},

    {"prims::",
     "abs acos acosh add amax amin as_strided as_strided_scatter asin asinh atan atan2 atanh bessel_i0 bessel_i0e "
     "bessel_i1 bessel_i1e bessel_j0 bessel_j1 bitwise_and bitwise_not bitwise_or bitwise_xor broadcast_in_dim cat "
     "cbrt ceil clone collapse collapse_view conj conj_physical convert_element_type copy_strided copy_to cos cosh "
     "device_put digamma div eq erf erf_inv erfc erfcx exp exp2 expm1 fft_c2c fft_c2r fft_r2c fill floor fmax fmin "
     "fmod frexp full full_like gcd ge gt hypot igamma igammac imag iota isfinite item le lgamma log log10 log1p "
     "log2 lt maximum maximum_value minimum minimum_value mul ndtri ne neg nextafter normal pow prod real "
     "reciprocal remainder reshape rev round rsqrt scalar_tensor shift_left shift_right_arithmetic sign signbit "
     "sin sinh spherical_bessel_j0 split_dim sqrt squeeze sub sum svd tan tanh transpose trunc uniform var view_of "
     "view_of_dtype where xor_sum zeta"},
    {"pippy::", "_pipe_split"},
};

constexpr RefusedFamily kFamilies[] = {
    {"aten::fbgemm_", kForeignMemory},
    {"aten::_cufft_", "it sets what the whole process uses"},
    {"aten::cudnn_ aten::_cudnn_ aten::miopen_ aten::mkldnn_ aten::_mkldnn_ aten::mps_ aten::_mps_", kOneLibrary},
    {"aten::quantize aten::q_", kQuantised},
    {"aten::sparse_ aten::_sparse_", kSparse},
    {"aten::_nested_", "it makes nested tensors, whose parts nobody checks"},
    {"aten::_test_", kTestOfItself},
};

constexpr std::string_view kTorchs[] = {"aten",     "prim",      "prims",    "c10d", "_c10d_functional",
                                        "inductor", "quantized", "symm_mem", "plumb"};

}  // namespace

std::span<const OperatorGroup> torch_operators() { return kGroups; }
std::span<const RefusedFamily> refused_families() { return kFamilies; }

bool is_torch_namespace(std::string_view space) {
  return std::find(std::begin(kTorchs), std::end(kTorchs), space) != std::end(kTorchs);
}

}  // namespace plumb
