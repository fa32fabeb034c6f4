"""Layers that are given inputs, states or sizes which do not fit. Each marks the line to blame and the code."""

# ruff: noqa: B007, B015, B904, E731, E741, F841, PLR0124, RET504, RUF059, RUF100, UP031

import torch
import torch.nn.functional as F
from torch import nn


def case_152_conv():
    m = nn.Conv2d(3, 8, 3)
    m(torch.randn(2, 1, 8, 8))  # <- TM152


def case_152_nhwc():
    m = nn.Conv2d(3, 8, 3)
    x = torch.randn(2, 8, 8, 3)
    m(x)  # <- TM152


def case_152_missing_channel():
    m = nn.Conv2d(1, 8, 3)
    x = torch.randn(64, 28, 28)
    m(x)  # <- TM152


def case_152_dims():
    m = nn.Conv2d(1, 8, 3)
    m(torch.randn(64, 28))  # <- TM152


def case_152_conv1d():
    m = nn.Conv1d(4, 8, 3)
    m(torch.randn(2, 20, 4))  # <- TM152


def case_152_conv1d_4d():
    m = nn.Conv1d(4, 8, 3)
    m(torch.randn(2, 4, 20, 3))  # <- TM152


def case_152_conv3d():
    m = nn.Conv3d(4, 8, 3)
    m(torch.randn(2, 3, 9, 9, 9))  # <- TM152


def case_152_transposed():
    m = nn.ConvTranspose2d(4, 8, 3)
    m(torch.randn(2, 3, 9, 9))  # <- TM152


def case_152_groups():
    m = nn.Conv2d(4, 8, 3, groups=2)
    m(torch.randn(2, 2, 9, 9))  # <- TM152


def case_152_fconv():
    w = torch.randn(8, 3, 3, 3)
    x = torch.randn(2, 4, 9, 9)
    F.conv2d(x, w, padding=1)  # <- TM152


def case_152_bn2d():
    m = nn.BatchNorm2d(4)
    m(torch.randn(2, 3, 9, 9))  # <- TM152


def case_152_bn2d_dims():
    m = nn.BatchNorm2d(4)
    m(torch.randn(2, 4))  # <- TM152


def case_152_bn1d_dims():
    m = nn.BatchNorm1d(4)
    m(torch.randn(2, 4, 3, 3))  # <- TM152


def case_152_bn1d_seq():
    m = nn.BatchNorm1d(16)
    m(torch.randn(2, 10, 16))  # <- TM152


def case_152_ln():
    m = nn.LayerNorm(8)
    m(torch.randn(2, 6))  # <- TM152


def case_152_ln2():
    m = nn.LayerNorm([8, 4])
    m(torch.randn(2, 4, 8))  # <- TM152


def case_152_rms():
    m = nn.RMSNorm(8)
    m(torch.randn(2, 6))  # <- TM152


def case_152_gn():
    m = nn.GroupNorm(4, 16)
    m(torch.randn(2, 8, 4, 4))  # <- TM152


def case_152_gn2():
    m = nn.GroupNorm(4, 16)
    m(torch.randn(2, 6, 4, 4))  # <- TM152


def case_152_in():
    m = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    m(torch.randn(2, 6, 4, 4))  # <- TM152


def case_152_prelu():
    m = nn.PReLU(4)
    m(torch.randn(2, 6, 4, 4))  # <- TM152


def case_152_nested():
    class Block(nn.Module):
        def __init__(self, i, o):
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(i), nn.ReLU())  # <- TM152

        def forward(self, x):
            return self.body(x)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.stages = nn.Sequential(Block(3, 8), Block(8, 8))

        def forward(self, x):
            return self.stages(x)

    M()(torch.randn(2, 3, 8, 8))


def case_162_conv():
    m = nn.Conv2d(3, 8, 9)
    m(torch.randn(2, 3, 4, 4))  # <- TM162


def case_162_pool():
    x = torch.randn(2, 3, 1, 1)
    F.max_pool2d(x, 2)  # <- TM162


def case_162_pool_m():
    m = nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.AvgPool2d(4))
    m(torch.randn(2, 3, 4, 4))  # <- TM162


def case_162_conv1d():
    m = nn.Conv1d(3, 8, 9)
    m(torch.randn(2, 3, 4))  # <- TM162


def case_162_avgpool1d():
    m = nn.AvgPool1d(9)
    m(torch.randn(2, 3, 4))  # <- TM162


def case_162_reflect():
    m = nn.ReflectionPad2d(5)
    m(torch.randn(2, 3, 4, 4))  # <- TM162


def case_163_dim():
    torch.rand(3).softmax(1)  # <- TM163


def case_163_sum():
    x = torch.rand(3, 2)
    x.sum(dim=2)  # <- TM163


def case_163_transpose():
    x = torch.rand(3)
    x.transpose(1, 2)  # <- TM163


def case_163_permute():
    x = torch.rand(3, 4, 5)
    x.permute(0, 3, 1, 2)  # <- TM163


def case_163_unpack():
    x = torch.rand(3, 4, 5)
    b, c, h, w = x.shape  # <- TM163


def case_163_unpack_size():
    x = torch.rand(3, 4, 5, 6)
    b, t, c = x.size()  # <- TM163


def case_163_size():
    x = torch.rand(3)
    x.size(1)  # <- TM163


def case_163_shape_index():
    x = torch.rand(3)
    x.shape[1]  # <- TM163


def case_163_logsoftmax_mod():
    nn.LogSoftmax(dim=1)(torch.rand(3))  # <- TM163


def case_163_too_many_idx():
    x = torch.rand(3, 2)
    x[:, :, 0]  # <- TM163


def case_163_index0d():
    x = torch.tensor(3.0)
    x[0]  # <- TM163


def case_163_flatten():
    torch.rand(3).flatten(1)  # <- TM163


def case_163_cat():
    torch.cat([torch.zeros(3), torch.zeros(3)], dim=1)  # <- TM163


def case_163_stack_dim():
    torch.stack([torch.zeros(3), torch.zeros(3)], dim=3)  # <- TM163


def case_163_glu():
    torch.max(torch.zeros(3), 1)  # <- TM163


def case_163_len0d():
    len(torch.tensor(3.0))  # <- TM163


def case_163_iter0d():
    for x in torch.tensor(3.0):  # <- TM163
        pass


def case_166_batch():
    m = nn.LSTM(4, 8, batch_first=True)
    h = (torch.zeros(1, 5, 8), torch.zeros(1, 5, 8))
    m(torch.rand(3, 2, 4), h)  # <- TM166


def case_166_gru():
    m = nn.GRU(4, 8, num_layers=2)
    h = torch.zeros(1, 3, 8)
    m(torch.rand(2, 3, 4), h)  # <- TM166


def case_166_hidden():
    m = nn.RNN(4, 8)
    m(torch.rand(2, 3, 4), torch.zeros(1, 3, 6))  # <- TM166


def case_166_dims():
    m = nn.GRU(4, 8)
    m(torch.rand(2, 3, 4), torch.zeros(3, 8))  # <- TM166


def case_166_cell():
    m = nn.LSTMCell(4, 8)
    m(torch.rand(3, 4), (torch.zeros(2, 8), torch.zeros(2, 8)))  # <- TM166


def case_166_lstm_tensor():
    m = nn.LSTM(4, 8)
    m(torch.rand(2, 3, 4), torch.zeros(1, 3, 8))  # <- TM166


def case_166_4d():
    m = nn.GRU(4, 8)
    m(torch.rand(2, 3, 4, 4))  # <- TM152


def case_167_bn():
    m = nn.BatchNorm1d(4)
    m(torch.rand(1, 4))  # <- TM167


def case_167_bn2d():
    m = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(4))
    m(torch.rand(1, 3, 8, 8))  # <- TM167


def case_167_in():
    nn.InstanceNorm2d(4)(torch.rand(2, 4, 1, 1))  # <- TM167


def case_177_heads():
    nn.MultiheadAttention(10, 3)  # <- TM177


def case_177_groups():
    nn.Conv2d(10, 6, 3, groups=4)  # <- TM177


def case_177_gn():
    nn.GroupNorm(4, 6)  # <- TM177


def case_177_tel():
    nn.TransformerEncoderLayer(10, 3)  # <- TM177


def case_177_outgroups():
    nn.Conv2d(4, 6, 3, groups=4)  # <- TM177


def case_177_ps():
    nn.PixelShuffle(2)(torch.rand(1, 3, 4, 4))  # <- TM177


def case_177_glu():
    F.glu(torch.rand(1, 3))  # <- TM177


def case_152_pool_dims():
    nn.MaxPool2d(2)(torch.rand(3, 4))  # <- TM152


def case_152_rnn1d():
    nn.LSTM(4, 8)(torch.rand(4))  # <- TM152


def case_150_unsorted():
    nn.utils.rnn.pack_padded_sequence(torch.rand(2, 5, 3), torch.tensor([3, 5]), batch_first=True)  # <- TM150


def case_150_zero():
    nn.utils.rnn.pack_padded_sequence(torch.rand(2, 5, 3), torch.tensor([3, 0]), batch_first=True)  # <- TM150


def case_150_count():
    nn.utils.rnn.pack_padded_sequence(torch.rand(2, 5, 3), torch.tensor([5, 4, 3]), batch_first=True)  # <- TM150


def case_150_batchfirst():
    x = torch.rand(6, 5, 3)
    lengths = [5, 4, 3, 3, 2, 1]
    nn.utils.rnn.pack_padded_sequence(x, lengths)  # <- TM150


def case_152_interp():
    F.interpolate(torch.rand(2, 3, 4), size=(8, 8), mode="bilinear")  # <- TM152


def case_152_interp2():
    nn.Upsample(scale_factor=2, mode="bilinear")(torch.rand(3, 4, 4))  # <- TM152
