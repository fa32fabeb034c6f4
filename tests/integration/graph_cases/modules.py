"""Modules, optimizers and their states that are put together wrongly. Each marks the line to blame and the code."""

# ruff: noqa: B007, B015, B904, E731, E741, F841, PLR0124, RET504, RUF059, RUF100, UP031

import torch
import torch.nn.functional as F
from torch import nn, optim


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(4, 8)
        self.dropout = nn.Dropout(0.1)
        self.fc_out = nn.Linear(8, 2)

    def forward(self, x):
        x = self.encoder(x)
        x = self.dropuot(x)  # attr
        return self.fc_out(x)

    @property
    def scale(self):
        return self.nothing.there

    def setup(self):
        self.late = nn.Linear(2, 2)


class Two(nn.Module):
    def forward(self, x, mask):
        return x * mask


def case_170_typo():
    n = Net()

    class Sub(Net):
        def forward(self, x):
            return self.dropuot(x)  # <- TM170

    Sub()(torch.rand(2, 4))


def case_170_late():
    n = Net()
    n.late(torch.rand(2, 2))  # <- TM170


def case_170_prop():
    n = Net()
    n.scale  # <- TM170


def case_170_dp():
    n = nn.DataParallel(Net())
    n.encoder  # <- TM170


def case_170_seq():
    s = nn.Sequential(nn.Linear(2, 2))
    s.fc  # <- TM170


def case_170_init_order():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.b = nn.Linear(self.width, 2)  # <- TM170
            self.width = 3

    M()


def case_170_tensor():
    x = torch.rand(3)
    x.foo  # <- TM900


def case_170_loss():
    crit = nn.CrossEntropyLoss()
    loss = crit.backwards()  # <- TM170


def case_170_local():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.Linear(2, 2)

        def forward(self, x):
            return self.layer(x)  # <- TM170

    M()(torch.rand(2, 2))


def case_171_assign():
    class M(nn.Module):
        def __init__(self):
            self.fc = nn.Linear(2, 2)  # <- TM171

    M()


def case_171_param():
    class M(nn.Module):
        def __init__(self):
            self.w = nn.Parameter(torch.zeros(2))  # <- TM171
            super().__init__()

    M()


def case_171_buffer():
    class M(nn.Module):
        def __init__(self):
            self.register_buffer("w", torch.zeros(2))  # <- TM171

    M()


def case_171_later():
    class M(nn.Module):
        def __init__(self):
            self.k = 3

        def forward(self, x):
            return x * self.k

    m = M()
    m.parameters
    list(m.parameters())  # <- TM171


def case_171_call():
    class M(nn.Module):
        def __init__(self):
            self.k = 3

        def forward(self, x):
            return x * self.k

    m = M()
    m(torch.rand(2))  # <- TM171


def case_171_sub():
    class B(nn.Module):
        def __init__(self, n):
            super().__init__()
            self.n = n

    class M(B):
        def __init__(self):
            super(B, self)
            self.fc = nn.Linear(2, 2)  # <- TM171

    M()


def case_171_noparen():
    class M(nn.Module):
        def __init__(self):
            super().__init__
            self.fc = nn.Linear(2, 2)  # <- TM171

    M()


def case_172_missing():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def foward(self, x):
            return self.fc(x)

    m = M()
    m(torch.rand(1, 2))  # <- TM172


def case_172_indent():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 2)

            def forward(self, x):
                return self.fc(x)

    M()(torch.rand(1, 2))  # <- TM172


def case_172_modulelist():
    m = nn.ModuleList([nn.Linear(2, 2)])
    m(torch.rand(1, 2))  # <- TM172


def case_172_mdict():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleDict({"a": nn.Linear(2, 2)})

        def forward(self, x):
            return self.layers(x)  # <- TM172

    M()(torch.rand(1, 2))


def case_173_missing():
    m = Two()
    m(torch.rand(2))  # <- TM173


def case_173_extra():
    m = nn.Linear(2, 2)
    m(torch.rand(1, 2), 3)  # <- TM173


def case_173_kw():
    m = Two()
    m(torch.rand(2), mask=1, foo=2)  # <- TM173


def case_173_crit():
    crit = nn.CrossEntropyLoss()
    crit(torch.rand(2, 2))  # <- TM173


def case_173_seq():
    m = nn.Sequential(Two())
    x = torch.rand(2)
    m(x, x)  # <- TM173


def case_173_seq_inner():
    m = nn.Sequential(nn.ReLU(), Two())
    x = torch.rand(2)
    m(x)  # <- TM173


def case_173_noself():
    class M(nn.Module):
        def forward(x):
            return x

    M()(torch.rand(2))  # <- TM173


def case_173_forward():
    m = Two()
    m.forward(torch.rand(2))  # <- TM173


def case_173_inside():
    class M(nn.Module):
        def forward(self, x):
            return helper(x)  # <- TM900

    def helper(a, b):
        return a

    M()(torch.rand(2))


def case_173_hook():
    m = Two()
    m.register_forward_hook(lambda *a: None)
    m(torch.rand(2))  # <- TM173


def case_173_hook_sig():
    m = nn.Linear(2, 2)
    m.register_forward_hook(lambda a: None)
    m(torch.rand(1, 2))  # <- TM900


def case_173_tgt():
    t = nn.Transformer(8, 2, 1, 1)
    t(torch.rand(3, 2, 8))  # <- TM173


def case_174_numel():
    m = nn.LazyLinear(3)
    sum(p.numel() for p in m.parameters())  # <- TM174


def case_174_adam():
    m = nn.Sequential(nn.LazyLinear(3), nn.ReLU())
    o = optim.Adam(m.parameters())
    for p in m.parameters():
        nn.init.normal_(p)  # <- TM174


def case_174_meta_to():
    with torch.device("meta"):
        m = nn.Linear(3, 3)
    m.to("cpu")  # <- TM174


def case_174_meta_fwd():
    m = nn.Linear(3, 3, device="meta")
    m(torch.rand(2, 3))  # <- TM174


def case_174_meta_item():
    m = nn.Linear(3, 3, device="meta")
    m.weight.sum().item()  # <- TM174


def case_174_meta_buffer():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.register_buffer("mask", torch.ones(5, 3), persistent=False)  # <- TM174

        def forward(self, x):
            return self.layer(x) * self.mask[: len(x)]

    with torch.device("meta"):
        m = Masked()
    m.load_state_dict(Masked().state_dict(), assign=True)
    m(torch.rand(2, 3))


def case_174_state():
    m = nn.LazyLinear(3)
    n = nn.Linear(2, 3)
    torch.nn.utils.parameters_to_vector(m.parameters())  # <- TM174


def case_174_shape():
    m = nn.LazyLinear(3)
    print(m.weight.shape)  # <- TM174


def case_175_size():
    nn.Linear(3, 2).load_state_dict(nn.Linear(4, 2).state_dict())  # <- TM175


def case_175_missing():
    sd = nn.Linear(3, 2, bias=False).state_dict()
    m = nn.Linear(3, 2)
    m.load_state_dict(sd)  # <- TM175


def case_175_prefix():
    m = Net()
    sd = nn.DataParallel(Net()).state_dict()
    m.load_state_dict(sd)  # <- TM175


def case_175_noprefix():
    m = nn.DataParallel(Net())
    sd = Net().state_dict()
    m.load_state_dict(sd)  # <- TM175


def case_175_ckpt():
    m = Net()
    ckpt = {"epoch": 3, "model": Net().state_dict(), "opt": {}}
    m.load_state_dict(ckpt)  # <- TM175


def case_175_type():
    m = Net()
    m.load_state_dict(Net())  # <- TM175


def case_175_opt():
    a = optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    b = optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1)
    a.load_state_dict(b.state_dict())  # <- TM175


def case_175_optgroups():
    a = optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    b = optim.SGD(
        [{"params": [torch.zeros(2, requires_grad=True)]}, {"params": [torch.zeros(2, requires_grad=True)]}], lr=0.1
    )
    a.load_state_dict(b.state_dict())  # <- TM175


def case_176_empty():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = [nn.Linear(2, 2), nn.Linear(2, 2)]

        def forward(self, x):
            return x

    m = M()
    opt = optim.SGD(m.parameters(), lr=0.1)  # <- TM176


def case_176_exhausted():
    m = nn.Linear(2, 2)
    params = m.parameters()
    n = sum(p.numel() for p in params)
    opt = optim.Adam(params)  # <- TM176


def case_176_nonleaf():
    w = torch.randn(3, requires_grad=True) * 0.1
    opt = optim.SGD([w], lr=0.1)  # <- TM176


def case_176_filter():
    m = nn.Linear(2, 2)
    for p in m.parameters():
        p.requires_grad = False
    opt = optim.SGD(filter(lambda p: p.requires_grad, m.parameters()), lr=0.1)  # <- TM176


def case_176_sparse():
    e = nn.Embedding(5, 3, sparse=True)
    o = optim.Adam(e.parameters())
    e(torch.tensor([1])).sum().backward()
    o.step()  # <- TM176


def case_176_tensor():
    w = torch.zeros(3, requires_grad=True)
    optim.SGD(w, lr=0.1)  # <- TM176


def case_176_noparen():
    m = nn.Linear(2, 2)
    optim.SGD(m.parameters, lr=0.1)  # <- TM176


def case_176_module():
    m = nn.Linear(2, 2)
    optim.SGD(m, lr=0.1)  # <- TM176


def case_176_modlist():
    m = nn.Linear(2, 2)
    optim.SGD([m], lr=0.1)  # <- TM176


def case_176_dup():
    m = nn.Linear(2, 2)
    optim.SGD([{"params": m.parameters()}, {"params": [m.weight]}], lr=0.1)  # <- TM176


def case_176_lr():
    m = nn.Linear(2, 2)
    optim.SGD(m.parameters(), lr=-1)  # <- TM900


def case_176_named():
    m = nn.Linear(2, 2)
    optim.SGD([("a", m.weight), m.bias], lr=0.1)  # <- TM900


def case_178_weight():
    m = nn.Linear(2, 2)
    m.weight = torch.zeros(2, 2)  # <- TM178


def case_178_module():
    m = nn.Sequential(nn.Linear(2, 2))

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 2)
            self.fc = torch.zeros(2)  # <- TM178

    M()


def case_178_tie():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(2, 3)
            self.b = nn.Linear(3, 2)
            self.b.weight = self.a.weight.t()  # <- TM178

    M()


def case_178_layer_like_a_method():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.to = nn.ModuleList([nn.Linear(2, 2), nn.ReLU()])  # <- TM178

        def forward(self, x):
            for layer in self.to:
                x = layer(x)
            return x

    M()(torch.zeros(1, 2))


def case_178_flag_like_a_method():
    class M(nn.Module):
        def __init__(self, train):
            super().__init__()
            self.train = train  # <- TM178

    nn.Sequential(nn.Linear(2, 2), M(True)).eval()


def case_178_method_replaced_on_purpose():
    m = nn.Linear(2, 2)
    m.train = lambda mode=True: m
    m.train(1, 2)  # <- TM900


def case_178_exists():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean = torch.zeros(2)
            self.register_buffer("mean", torch.zeros(2))  # <- TM178

    M()


def case_178_seq():
    nn.Sequential(nn.Linear(2, 2), F.relu)  # <- TM178


def case_178_seq_list():
    nn.Sequential([nn.Linear(2, 2), nn.ReLU()])  # <- TM178


def case_178_mlist():
    nn.ModuleList([nn.Linear(2, 2), torch.relu])  # <- TM178


def case_178_class():
    nn.Sequential(nn.Linear(2, 2), nn.ReLU)  # <- TM178


def case_178_none_fine():
    m = nn.Linear(2, 2)
    m.bias = None
    m.bias = 3  # <- TM178


def case_179_lbfgs():
    m = nn.Linear(2, 2)
    o = optim.LBFGS(m.parameters())
    m(torch.rand(1, 2)).sum().backward()
    o.step()  # <- TM179


def case_179_plateau():
    m = nn.Linear(2, 2)
    o = optim.SGD(m.parameters(), lr=0.1)
    s = optim.lr_scheduler.ReduceLROnPlateau(o)
    s.step()  # <- TM179


def case_179_onecycle():
    m = nn.Linear(2, 2)
    o = optim.SGD(m.parameters(), lr=0.1)
    s = optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=3)
    for i in range(5):
        o.step()
        s.step()  # <- TM179


def case_170_mdict():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = nn.ModuleDict({"seg": nn.Linear(2, 2)})

        def forward(self, x):
            return self.heads["segm"](x)  # <- TM170

    M()(torch.rand(1, 2))


def case_170_mlist():
    l = nn.ModuleList([nn.Linear(2, 2)])
    l[3]  # <- TM170


def case_170_seqidx():
    l = nn.Sequential(nn.Linear(2, 2))
    l[1].weight  # <- TM170


def case_175_part():
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.head = nn.Linear(3, 2), nn.Linear(2, 2)

    m = Classifier()
    m.load_state_dict(nn.Linear(3, 2).state_dict())  # <- TM175
